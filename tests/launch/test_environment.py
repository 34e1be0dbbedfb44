"""launch/environment.sh, with a Python whose pip only takes time."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import QUICKSTART, ROOT

pytestmark = pytest.mark.waits

# `-m venv FOLDER` puts itself there; `-m pip install --require-hashes -r ...` notes the head of the lock, and waits for
# the file that PIP_WAITS_FOR names, if it does.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    --version) echo "Python ${0##*/python}.4" ;;
    -c*) [[ "$*" == *"!= '${0##*/python}'"* ]] ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install"*" --require-hashes "*)
        wanted=$(head -n 1 "${@: -1}")
        [[ $wanted =~ ^pip== ]] && exit
        echo "$wanted" >>"$BUILDS"
        echo "${PIP_NO_INDEX:-} ${PIP_FIND_LINKS:-}" >"$BUILDS.wheels"
        until [ -z "${PIP_WAITS_FOR:-}" ] || [ -e "$PIP_WAITS_FOR" ]; do sleep 0.05; done ;;
    "-m megappo "*) printf '%s\n' "$PWD" "${PYTHONPATH%%:*}" "$@" ;;
esac
"""
USE = 'set -euo pipefail; source launch/environment.sh; ensure_environment "$1"; echo "uses $VIRTUAL_ENV"; '


class Machine:
    """A home with clones of the repository's launch folder, and with interpreters that stand first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.builds = folder, folder / "builds"
        self.builds.touch()
        (folder / "bin").mkdir()
        for version in ("3.11", "3.12"):
            self.add_python(folder / "bin" / f"python{version}")
        self.started: list[subprocess.Popen[str]] = []

    @staticmethod
    def add_python(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PYTHON)
        path.chmod(0o755)

    def clone(self, name: str, requirement: str = "") -> Path:
        root = self.folder / name
        shutil.copytree(ROOT / "launch", root / "launch")
        for lock in (root / "launch" / "locks").iterdir():
            lock.write_text(lock.read_text() + requirement)
        return root

    def start(
        self,
        clone: Path,
        kind: str = "light",
        then: str = "",
        version: str = "",
        waits_for: Path | None = None,
        **variables: str,
    ) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPPO_")}
        settings = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "MEGAPPO_CACHE": str(self.folder / "cache")}
        settings |= {
            "MEGAPPO_PYTHON_VERSION": version,
            "BUILDS": str(self.builds),
            "PIP_WAITS_FOR": str(waits_for or ""),
        }
        process = subprocess.Popen(
            ["bash", "-c", USE + then, "bash", kind], cwd=clone, env=kept | settings | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def use(self, clone: Path, kind: str = "light", version: str = "") -> Path:
        """The environment that a script of this clone gets."""
        process = self.start(clone, kind, version=version)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        return Path(said.splitlines()[-1].removeprefix("uses "))

    def run(self, clone: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run launch/environment.sh of a clone."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPPO_")}
        settings = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "MEGAPPO_CACHE": str(self.folder / "cache")}
        return subprocess.run(
            ["bash", "launch/environment.sh", *words], cwd=clone, capture_output=True, text=True, timeout=60,
            check=False, env=kept | settings | {"BUILDS": str(self.builds), "PIP_WAITS_FOR": ""} | variables,
        )  # fmt: skip

    def prune(self, clone: Path, *words: str) -> str:
        done = self.run(clone, "prune", *words)
        return done.stdout + done.stderr

    def wait_for_builds(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.builds.read_text().splitlines()) < count:
            assert time.monotonic() < deadline, f"{self.builds.read_text()!r} has not {count} builds"
            time.sleep(0.02)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for process in made.started:
        with suppress(ProcessLookupError):  # what outlived its script is in the script's process group too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_clones_kinds_and_python_versions_live_side_by_side(machine: Machine) -> None:
    one, two = machine.clone("one"), machine.clone("two", "another-requirement\n")
    used = [machine.use(one), machine.use(two), machine.use(one, "full"), machine.use(two, version="3.12")]
    assert len(set(used)) == 4 and all((folder / "complete").exists() for folder in used)
    assert machine.use(one) == used[2], "the full environment serves for the light one"
    assert len(machine.builds.read_text().splitlines()) == 4


def test_the_full_set_has_python_3_12_where_it_is(machine: Machine) -> None:
    """The light one 3.11; `MEGAPPO_PYTHON_VERSION` chooses for both; the build says which it is."""

    def built(kind: str, version: str = "") -> str:
        said, _ = machine.start(clone, kind, version=version).communicate(timeout=60)
        return said.splitlines()[0].partition(" with ")[2].partition(" (")[0]

    clone, folder = machine.clone("one"), machine.folder / "bin"
    assert built("light") == f"Python 3.11.4 from {folder}/python3.11"
    assert built("light", "3.12") == f"Python 3.12.4 from {folder}/python3.12"
    assert built("full") == f"Python 3.12.4 from {folder}/python3.12"
    assert built("full", "3.11") == f"Python 3.11.4 from {folder}/python3.11"


@pytest.mark.parametrize("name", ["python3.12", "./python3.12", "python-of-mine", "ABSOLUTE"])
def test_exactly_the_named_interpreter_is_used(tmp_path: Path, name: str) -> None:
    """No other `python` in the same folder is used. A name without a folder is searched on PATH."""
    for program in ("python3.12", "python-of-mine", "python"):
        (tmp_path / program).write_text(f'#!/usr/bin/env bash\necho "{program} $*"\n')
        (tmp_path / program).chmod(0o755)
    given = str(tmp_path / "python3.12") if name == "ABSOLUTE" else name
    environment = os.environ | {"MEGAPPO_PYTHON": given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for command, words in (("megappo", "-m megappo plan"), ("python", "plan")):
        done = subprocess.run(
            [str(ROOT / "launch" / command), "plan"], cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        expected = "python-of-mine" if name == "python-of-mine" else "python3.12"
        assert done.stdout == f"{expected} {words}\n", done.stderr


@pytest.mark.parametrize("given", ["/nowhere/python", "no-such-python", "FOLDER", "TEXT"])
def test_a_path_without_an_interpreter_is_refused(tmp_path: Path, given: str) -> None:
    (tmp_path / "text").write_text("not a program")
    named = {"FOLDER": str(tmp_path), "TEXT": str(tmp_path / "text")}.get(given, given)
    done = subprocess.run(
        [str(ROOT / "launch/megappo"), "plan"], env=os.environ | {"MEGAPPO_PYTHON": named}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"MEGAPPO_PYTHON is '{named}', must be an executable file; set it to the" in done.stderr


def test_a_colon_in_the_path_of_the_repository_is_refused(machine: Machine) -> None:
    clone = machine.clone("one:two")
    output, _ = machine.start(clone).communicate(timeout=60)
    assert "contains a ':', which separates paths in PYTHONPATH; move the repository" in output


def test_an_exported_cdpath_changes_nothing() -> None:
    """With it `cd` prints the folder that it goes to."""
    command = ["bash", "-c", 'source launch/environment.sh; echo "$ROOT"']
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"CDPATH": f".:{ROOT.parent}"}, check=True
    )
    assert done.stdout == f"{ROOT}\n"


def chosen(machine: Machine, **settings: str) -> str:
    """What `find_python full` says where PATH has no other interpreters than the machine's."""
    tools = machine.folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "dirname", "sort"):
        if not (tools / name).exists():
            (tools / name).symlink_to(shutil.which(name) or name)
    path = f"{machine.folder}/bin:{tools}"
    done = subprocess.run(
        ["bash", "-c", "source launch/environment.sh; find_python full"], cwd=ROOT, capture_output=True, text=True,
        env={"PATH": path, "HOME": str(machine.folder)} | settings, check=False,
    )  # fmt: skip
    return (done.stdout + done.stderr).strip()


def test_an_interpreter_that_is_not_active_is_found(machine: Machine) -> None:
    """Of pyenv and of uv, the newest of its version; where there is none, the other version, or a sentence."""
    home = machine.folder
    (home / "bin" / "python3.12").unlink()
    assert chosen(machine) == f"{home}/bin/python3.11"
    of_uv = home / ".local/share/uv/python/cpython-3.12.2-linux/bin/python3.12"
    machine.add_python(of_uv)
    assert chosen(machine) == str(of_uv)
    for number in (4, 10):
        machine.add_python(home / "pyenv" / "versions" / f"3.12.{number}" / "bin" / "python3.12")
    of_pyenv = str(home / "pyenv" / "versions" / "3.12.10" / "bin" / "python3.12")
    assert chosen(machine, PYENV_ROOT=str(home / "pyenv"), UV_PYTHON_INSTALL_DIR=str(home)) == of_pyenv
    assert chosen(machine, MEGAPPO_PYTHON_VERSION="3.11") == f"{home}/bin/python3.11"
    assert "MEGAPPO_PYTHON_VERSION is '3.10', must be 3.11 or 3.12" in chosen(machine, MEGAPPO_PYTHON_VERSION="3.10")
    (home / "bin" / "python3.11").unlink()
    said = chosen(machine, UV_PYTHON_INSTALL_DIR=str(home))
    assert "no Python 3.12 or 3.11 with its venv module found; install one, or set MEGAPPO_PYTHON" in said


def test_what_others_can_change_is_not_run(machine: Machine) -> None:
    """Unless that is said. What is built is nobody else's, whatever the umask."""
    clone, cache = machine.clone("one"), machine.folder / "cache"
    before = os.umask(0o002)
    try:
        folder = machine.use(clone)
    finally:
        os.umask(before)
    assert not {path.stat().st_mode & 0o022 for path in (cache, folder)} - {0}
    changes: list[Callable[[Path], object]] = [lambda path: path.chmod(0o775), lambda path: path.chmod(0o757)]
    changes += [lambda path: os.chown(path, 12345, -1)] if os.geteuid() == 0 else []
    for path in (cache, folder, folder / "bin"):
        path.mkdir(exist_ok=True)
        for change in changes:
            change(path)
            refused = machine.start(clone)
            said = refused.communicate(timeout=60)[0]
            assert refused.returncode == 2 and f"other users than you and root can write to {path}" in said, said
            trusting = machine.start(clone, MEGAPPO_SHARED_CACHE="yes")
            assert trusting.communicate(timeout=60)[0].splitlines()[-1] == f"uses {folder}"
            path.chmod(0o755)
            if os.geteuid() == 0:
                os.chown(path, 0, -1)


@pytest.mark.parametrize(("kind", "short"), [("light", 3 * 1024**2), ("full", 12 * 1024**2)])
def test_a_disk_that_is_too_full_is_told_before_the_build(machine: Machine, kind: str, short: int) -> None:
    clone, df = machine.clone("one"), machine.folder / "bin" / "df"
    for kibibytes, code in ((short, 2), (short + 1024**2, 0)):
        df.write_text(f"#!/bin/sh\necho head\necho disk 999999999 9 {kibibytes} 9% /\n")
        df.chmod(0o755)
        build = machine.start(clone, kind)
        said, _ = build.communicate(timeout=60)
        assert build.returncode == code, said
        refusal = (
            f"cache has {short // 1024} MiB free, and a {kind} environment needs about {short // 1024**2 + 1} GiB; free"
        )
        assert (refusal in said) == (code == 2), said
        assert len(machine.builds.read_text().splitlines()) == (0 if code else 1)


def test_two_builds_of_one_environment_are_one(machine: Machine) -> None:
    clone, go = machine.clone("one"), machine.folder / "go"
    scripts = [machine.start(clone, waits_for=go) for _ in range(3)]
    machine.wait_for_builds(1)
    go.touch()
    said = [script.communicate(timeout=60)[0].splitlines()[-1] for script in scripts]
    assert len(set(said)) == 1 and said[0].startswith("uses "), said
    assert len(machine.builds.read_text().splitlines()) == 1


@pytest.mark.parametrize("place", ["home/lib/python3.12/site-packages", "target"])
def test_launchers_that_pip_installed_use_the_environment_they_are_in(machine: Machine, place: str) -> None:
    """Or, in a folder of their own, the Python of PATH; they build nothing."""
    shipped, home = machine.folder / place / "megappo" / "shipped", machine.folder / "home"
    shutil.copytree(ROOT / "launch", shipped / "launch")
    machine.add_python(home / "bin" / "python")
    machine.add_python(machine.folder / "bin" / "python")
    command = ["bash", "-c", "source launch/environment.sh; ensure_environment full; type -P python"]
    environment = {"PATH": f"{machine.folder / 'bin'}:/usr/bin:/bin", "MEGAPPO_CACHE": str(machine.folder / "cache")}
    done = subprocess.run(command, cwd=shipped, env=environment, capture_output=True, text=True, check=True)
    used = home if "site-packages" in place else machine.folder
    assert done.stdout == f"{used}/bin/python\n" and not (machine.folder / "cache").exists(), done.stderr


def test_the_quickstart_needs_no_sglang_where_there_are_gpus(machine: Machine) -> None:
    """Its settings name the other engine."""
    clone = machine.clone("one")
    (clone / "configs").mkdir()
    shutil.copy(QUICKSTART, clone / "configs")
    smi = machine.folder / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 0\n")
    smi.chmod(0o755)
    said, _ = machine.start(clone, then="exec bash launch/quickstart.sh", kind="light").communicate(timeout=60)
    (built,) = machine.builds.read_text().splitlines()
    assert built.startswith("# The light environment of Python 3.11;"), said


@pytest.mark.parametrize(
    ("gpus", "visible", "processes"), [(1, None, 1), (1, "", 2), (2, "1", 1), (2, "0,1", 2), (0, None, 2)]
)
def test_the_quickstart_runs_on_one_gpu_too(machine: Machine, gpus: int, visible: str | None, processes: int) -> None:
    """There on one process, whose models are not split; NCCL refuses two on one GPU."""
    clone = machine.clone("one")
    (clone / "configs").mkdir()
    shutil.copy(QUICKSTART, clone / "configs")
    (clone / "launch" / "torchrun.sh").write_text('printf "%s\\n" "$@"\n')
    (clone / "launch" / "torchrun.sh").chmod(0o755)
    smi = machine.folder / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n" * gpus)
    smi.chmod(0o755)
    given: dict[str, Any] = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    said, _ = machine.start(clone, then="exec bash launch/quickstart.sh run.steps=3", **given).communicate(timeout=60)
    words = said.splitlines()
    split = ["actor.layout.tensor_parallel=1", "critic.layout.pipeline_parallel=1"]
    assert words[words.index("train") - 1] == str(processes) and "run.steps=3" in words, said
    assert [w for w in split if w in words] == (split if processes == 1 else [])


def test_the_command_finds_its_environment_from_any_folder(machine: Machine, tmp_path: Path) -> None:
    """Through a link too; files are named from where the caller stands, and what they say decides what is built."""
    clone, elsewhere = machine.clone("one"), tmp_path / "else where"
    elsewhere.mkdir()
    (elsewhere / "run.yaml").write_text("rollout: {engine: sglang}\n")
    (tmp_path / "bin" / "megappo").symlink_to(clone / "launch" / "megappo")
    for words in (["plan", "run.yaml", "run.name=a b"], ["train", "run.yaml", "run.name=a b"]):
        done = machine.start(clone, then=f'cd "{elsewhere}"; exec megappo {shlex.join(words)}').communicate(timeout=60)
        assert done[0].splitlines()[-7:] == [str(elsewhere), str(clone), "-m", "megappo", *words], done
    built = [line.split()[2] for line in machine.builds.read_text().splitlines()]
    assert built == ["light", "full"], "a plan needs no SGLang"


def test_a_build_waits_for_no_other_environments_build(machine: Machine) -> None:
    go = machine.folder / "go"
    scripts = [machine.start(machine.clone(name, name), waits_for=go) for name in ("one", "two")]
    machine.wait_for_builds(2)  # both, before either ends
    go.touch()
    assert [script.wait(timeout=60) for script in scripts] == [0, 0]


def test_a_build_that_was_killed_is_made_again(machine: Machine) -> None:
    clone, never = machine.clone("one"), machine.folder / "never"
    killed = machine.start(clone, waits_for=never)
    machine.wait_for_builds(1)
    os.killpg(killed.pid, signal.SIGKILL)
    assert (machine.use(clone) / "complete").exists()
    assert len(machine.builds.read_text().splitlines()) == 2


def test_prune_keeps_what_is_used(machine: Machine) -> None:
    """By this clone, by a script that runs, by its children after it, by a program with files mapped, or lately."""
    clones = {name: machine.clone(name, name) for name in ("own", "running", "mapped", "recent", "left")}
    folders = {name: machine.use(clone) for name, clone in clones.items()}
    for name in ("own", "running", "mapped", "left"):
        os.utime(folders[name] / "complete", (0, 0))
    go = machine.folder / "go"
    ends = 'echo ready; sh -c \'until [ -e "$0" ]; do sleep 0.05; done\' "$PIP_WAITS_FOR" & disown'
    script = machine.start(clones["running"], then=ends, waits_for=go)
    assert script.stdout is not None and "ready\n" in iter(script.stdout.readline, "")
    os.utime(folders["running"] / "complete", (0, 0))
    shutil.copy(shutil.which("sleep") or "", folders["mapped"] / "sleep")
    mapped = subprocess.Popen([str(folders["mapped"] / "sleep"), "60"])
    try:
        said = machine.prune(clones["own"])
    finally:
        mapped.kill()
        mapped.wait()
    assert {name for name, folder in folders.items() if folder.exists()} == {"own", "running", "mapped", "recent"}
    assert f"kept     {folders['own']}: this clone uses it" in said
    assert f"kept     {folders['running']}: it is in use" in said
    assert f"kept     {folders['mapped']}: it is in use" in said
    assert f"kept     {folders['recent']}: it was used in the last 7 days" in said
    assert f"removed  {folders['left']}:" in said
    go.touch()
    script.wait(timeout=60)
    assert f"removed  {folders['recent']}:" in machine.prune(clones["own"], "0")


def test_a_login_node_builds_the_environment_of_the_nodes_with_gpus(machine: Machine) -> None:
    """The node has no GPU. The wheels come from one folder, and pip uses no index."""
    clone, wheels = machine.clone("one"), machine.folder / "my wheels"
    wheels.mkdir()
    done = machine.run(clone, "build", "--gpu", "--wheels", str(wheels))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"built {machine.use(clone, 'full')}; all nodes with access to this folder use it\n"
    assert len(machine.builds.read_text().splitlines()) == 1
    links = (machine.folder / "builds.wheels").read_text()
    assert links == f"1 file://{machine.folder}/my%20wheels\n"
    other = machine.clone("two", "two")
    assert machine.run(other, "build").stdout.startswith(f"built {machine.use(other, 'light')};")


@pytest.mark.parametrize(
    ("words", "variables", "sentence"),
    [
        (["build", "--wheels", "missing"], {}, "--wheels is 'missing', must be a folder with wheels"),
        (["build", "--wheels"], {}, "--wheels is '', must be a folder with wheels"),
        (["build"], {"MEGAPPO_PYTHON": "python3"}, "MEGAPPO_PYTHON is 'python3', so the scripts use this interpreter"),
        (["build", "--cpu"], {}, "usage: launch/environment.sh build [--gpu] [--wheels FOLDER] | prune [DAYS]"),
        ([], {}, "usage: launch/environment.sh build"),
    ],
)
def test_wrong_words_of_a_build(machine: Machine, words: list[str], variables: dict[str, str], sentence: str) -> None:
    done = machine.run(machine.clone("one"), *words, **variables)
    assert done.returncode == 2 and sentence in done.stderr and not machine.builds.read_text()


def test_prune_wants_a_number_of_days(machine: Machine) -> None:
    assert "'all' is not a number of days; usage:" in machine.prune(machine.clone("one"), "all")


@pytest.mark.parametrize(
    ("gpus", "words", "kind"),
    [
        (True, ("train", "{}/said.yaml"), "light"),
        (True, ("train", "{}/unsaid.yaml"), "full"),
        (True, ("train", "{}/unsaid.yaml", "rollout.engine=transformers"), "light"),
        (False, ("train", "{}/unsaid.yaml"), "light"),
        (False, ("train", "{}/unsaid.yaml", "rollout.engine=sglang"), "full"),
    ],
)
def test_sglang_is_there_where_it_generates_by_default(
    gpus: bool, words: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    (tmp_path / "said.yaml").write_text("rollout: {engine: transformers}\n")
    (tmp_path / "unsaid.yaml").write_text("rollout: {prompts_per_step: 8}\n")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexit {0 if gpus else 9}\n")
    program.chmod(0o755)
    script = 'source launch/environment.sh; environment_for "$@"'
    found = subprocess.run(
        ["bash", "-c", script, "bash", *(word.format(tmp_path) for word in words)],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == kind
