"""Tests of launch/environment.sh, with a test Python whose pip installs nothing."""

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

from megappo.config import load_config
from tests.support.harness import write_program
from tests.support.places import QUICKSTART, ROOT

pytestmark = pytest.mark.waits

# `-m venv FOLDER` copies this program. `-m pip install --require-hashes -r ...` records the first line of the lock. The
# call then waits for the file in PIP_WAITS_FOR, if the variable is set.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    --version) echo "Python ${0##*/python}.4" ;;
    -c*) [[ "$*" == *"!= '${0##*/python}'"* ]] ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install"*" --require-hashes "*)
        lock=$(head -n 1 "${@: -1}")
        [[ $lock =~ ^pip== ]] && exit
        echo "$lock" >>"$BUILDS"
        echo "${PIP_NO_INDEX:-} ${PIP_FIND_LINKS:-}" >"$BUILDS.wheels"
        until [ -z "${PIP_WAITS_FOR:-}" ] || [ -e "$PIP_WAITS_FOR" ]; do sleep 0.05; done ;;
    "-m megappo "*) printf '%s\n' "$PWD" "${PYTHONPATH%%:*}" "$@" ;;
esac
"""
USE = 'set -euo pipefail; source launch/environment.sh; ensure_environment "$1"; echo "uses $VIRTUAL_ENV"; '


class Machine:
    """A home folder with clones of the launch folder, and with test interpreters that come first in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.builds = folder, folder / "builds"
        self.builds.touch()
        (folder / "bin").mkdir()
        for version in ("3.11", "3.12"):
            write_program(folder / "bin" / f"python{version}", PYTHON)
        self.started: list[subprocess.Popen[str]] = []
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPPO_")}
        self.environment = inherited | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "MEGAPPO_CACHE": str(folder / "cache"),
            "BUILDS": str(self.builds),
        }  # fmt: skip

    def clone(self, name: str, requirement: str = "") -> Path:
        root = self.folder / name
        shutil.copytree(ROOT / "launch", root / "launch")
        for lock in (root / "launch" / "locks").iterdir():
            lock.write_text(lock.read_text() + requirement)
        return root

    def start(
        self, clone: Path, kind: str = "light", then: str = "", version: str = "", *, waits_for: Path | None = None,
        **variables: str,
    ) -> subprocess.Popen[str]:  # fmt: skip
        settings = {"MEGAPPO_PYTHON_VERSION": version, "PIP_WAITS_FOR": str(waits_for or "")}
        process = subprocess.Popen(
            ["bash", "-c", USE + then, "bash", kind], cwd=clone, env=self.environment | settings | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def output(self, clone: Path, *arguments: str, code: int | None = None, **options: Any) -> list[str]:
        """Return the lines that a script of this clone prints, and check its exit code."""
        process = self.start(clone, *arguments, **options)
        lines = process.communicate(timeout=60)[0].splitlines()
        assert code is None or process.returncode == code, lines
        return lines

    def built(self) -> list[str]:
        """Return the first line of the lock of each build."""
        return self.builds.read_text().splitlines()

    def use(self, clone: Path, kind: str = "light", version: str = "") -> Path:
        """Return the environment that a script of this clone uses."""
        return Path(self.output(clone, kind, code=0, version=version)[-1].removeprefix("uses "))

    def run(self, clone: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run launch/environment.sh of a clone."""
        environment = self.environment | {"PIP_WAITS_FOR": ""} | variables
        command = ["bash", "launch/environment.sh", *arguments]
        return subprocess.run(
            command, cwd=clone, capture_output=True, text=True, timeout=60, check=False, env=environment
        )

    def prune(self, clone: Path, *arguments: str) -> str:
        done = self.run(clone, "prune", *arguments)
        return done.stdout + done.stderr

    def wait_for_builds(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.built()) < count:
            assert time.monotonic() < deadline, f"{self.builds.read_text()!r} has not {count} builds"
            time.sleep(0.02)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for process in made.started:
        with suppress(ProcessLookupError):  # processes that outlive a script are in the same process group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_clones_kinds_and_versions_have_separate_environments(machine: Machine) -> None:
    one, two = machine.clone("one"), machine.clone("two", "another-requirement\n")
    used = [machine.use(one), machine.use(two), machine.use(one, "full"), machine.use(two, version="3.12")]
    assert len(set(used)) == 4 and all((folder / "complete").exists() for folder in used)
    assert machine.use(one) == used[2], "the full environment must also be used as the light environment"
    assert len(machine.built()) == 4


def test_full_set_prefers_python_3_12(machine: Machine) -> None:
    """The light set uses 3.11. `MEGAPPO_PYTHON_VERSION` selects the version for both. The build reports the
    version."""

    def built(kind: str, version: str = "") -> str:
        return machine.output(clone, kind, version=version)[0].partition(" with ")[2].partition(" (")[0]

    clone, folder = machine.clone("one"), machine.folder / "bin"
    assert built("light") == f"Python 3.11.4 from {folder}/python3.11"
    assert built("light", "3.12") == f"Python 3.12.4 from {folder}/python3.12"
    assert built("full") == f"Python 3.12.4 from {folder}/python3.12"
    assert built("full", "3.11") == f"Python 3.11.4 from {folder}/python3.11"


def test_colon_in_repository_path_is_refused(machine: Machine) -> None:
    output = machine.output(machine.clone("one:two"))
    assert "contains a ':', which separates paths in PYTHONPATH; move the repository" in "".join(output)


def selected(machine: Machine, **settings: str) -> str:
    """Return the output of `find_python full` if PATH contains only the interpreters of the machine."""
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


def test_inactive_interpreters_are_used(machine: Machine) -> None:
    """Interpreters of pyenv and uv are used, the newest of each version. Without one, the other version or an
    error."""
    home = machine.folder
    (home / "bin" / "python3.12").unlink()
    assert selected(machine) == f"{home}/bin/python3.11"
    of_uv = home / ".local/share/uv/python/cpython-3.12.2-linux/bin/python3.12"
    write_program(of_uv, PYTHON)
    assert selected(machine) == str(of_uv)
    for number in (4, 10):
        write_program(home / "pyenv" / "versions" / f"3.12.{number}" / "bin" / "python3.12", PYTHON)
    of_pyenv = str(home / "pyenv" / "versions" / "3.12.10" / "bin" / "python3.12")
    assert selected(machine, PYENV_ROOT=str(home / "pyenv"), UV_PYTHON_INSTALL_DIR=str(home)) == of_pyenv
    assert selected(machine, MEGAPPO_PYTHON_VERSION="3.11") == f"{home}/bin/python3.11"
    assert "MEGAPPO_PYTHON_VERSION is '3.10', must be 3.11 or 3.12" in selected(machine, MEGAPPO_PYTHON_VERSION="3.10")
    (home / "bin" / "python3.11").unlink()
    output = selected(machine, UV_PYTHON_INSTALL_DIR=str(home))
    assert "no Python 3.12 or 3.11 with its venv module found; install one, or set MEGAPPO_PYTHON" in output


def test_environment_with_foreign_write_access_is_refused(machine: Machine) -> None:
    """The user can allow such environments. Other users cannot write to built environments, for any umask."""
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
            assert f"other users than you and root can write to {path}" in "".join(machine.output(clone, code=2))
            assert machine.output(clone, MEGAPPO_SHARED_CACHE="yes")[-1] == f"uses {folder}"
            path.chmod(0o755)
            if os.geteuid() == 0:
                os.chown(path, 0, -1)


@pytest.mark.parametrize("cache", ["/proc/x", "FILE/x"])
def test_cache_without_write_access_is_named(machine: Machine, cache: str) -> None:
    (machine.folder / "file").touch()
    cache = cache.replace("FILE", str(machine.folder / "file"))
    (line,) = machine.output(machine.clone("one"), MEGAPPO_CACHE=cache)
    message = f"the folder of the environments, {cache}, cannot be created or written; set MEGAPPO_CACHE"
    assert line.startswith(f"megappo: error: {message}")


@pytest.mark.parametrize(("kind", "short"), [("light", 3 * 1024**2), ("full", 12 * 1024**2)])
def test_full_disk_is_reported_before_the_build(machine: Machine, kind: str, short: int) -> None:
    clone, df = machine.clone("one"), machine.folder / "bin" / "df"
    for kibibytes, code in ((short, 2), (short + 1024**2, 0)):
        write_program(df, f"#!/bin/sh\necho head\necho disk 999999999 9 {kibibytes} 9% /\n")
        output = "".join(machine.output(clone, kind, code=code))
        needed = f"and a {kind} environment needs about {short // 1024**2 + 1} GiB; free"
        assert (f"cache has {short // 1024} MiB free, {needed}" in output) == (code == 2), output
        assert len(machine.built()) == (0 if code else 1)


def test_concurrent_builds_of_one_environment_are_shared(machine: Machine) -> None:
    clone, go = machine.clone("one"), machine.folder / "go"
    scripts = [machine.start(clone, waits_for=go) for _ in range(3)]
    machine.wait_for_builds(1)
    go.touch()
    output = [script.communicate(timeout=60)[0].splitlines()[-1] for script in scripts]
    assert len(set(output)) == 1 and output[0].startswith("uses "), output
    assert len(machine.built()) == 1


@pytest.mark.parametrize("place", ["home/lib/python3.12/site-packages", "target"])
def test_installed_launchers_use_their_environment(machine: Machine, place: str) -> None:
    """In a separate folder, the launchers use the Python in PATH. The launchers build no environment."""
    shipped, home = machine.folder / place / "megappo" / "shipped", machine.folder / "home"
    shutil.copytree(ROOT / "launch", shipped / "launch")
    for folder in (home, machine.folder):
        write_program(folder / "bin" / "python", PYTHON)
    command = ["bash", "-c", "source launch/environment.sh; ensure_environment full; type -P python"]
    environment = {"PATH": f"{machine.folder / 'bin'}:/usr/bin:/bin", "MEGAPPO_CACHE": str(machine.folder / "cache")}
    done = subprocess.run(command, cwd=shipped, env=environment, capture_output=True, text=True, check=True)
    used = home if "site-packages" in place else machine.folder
    assert done.stdout == f"{used}/bin/python\n" and not (machine.folder / "cache").exists(), done.stderr


def clone_with_quickstart(machine: Machine, nvidia_smi: str) -> Path:
    """Return a clone with the quickstart, on a machine with this `nvidia-smi`."""
    clone = machine.clone("one")
    (clone / "configs").mkdir()
    shutil.copy(QUICKSTART, clone / "configs")
    write_program(machine.folder / "bin" / "nvidia-smi", f"#!/bin/sh\n{nvidia_smi}")
    return clone


def test_quickstart_on_gpus_needs_no_sglang(machine: Machine) -> None:
    """The settings of the quickstart select the transformers engine."""
    output = machine.output(clone_with_quickstart(machine, "exit 0\n"), then="exec bash launch/quickstart.sh")
    (built,) = machine.built()
    assert built.startswith("# The light environment of Python 3.11;"), output


@pytest.mark.parametrize(
    ("gpus", "visible", "processes"), [(1, None, 1), (1, "", 2), (2, "1", 1), (2, "0,1", 2), (0, None, 2)]
)
def test_quickstart_runs_on_one_gpu(machine: Machine, gpus: int, visible: str | None, processes: int) -> None:
    """One GPU runs one process without model parallelism, because NCCL does not support two ranks on one GPU."""
    clone = clone_with_quickstart(machine, "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n" * gpus)
    write_program(clone / "launch" / "torchrun.sh", 'printf "%s\\n" "$@"\n')
    extra: dict[str, Any] = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    arguments = machine.output(clone, then="exec bash launch/quickstart.sh run.steps=3", **extra)
    split = ["actor.layout.tensor_parallel=1", "critic.layout.pipeline_parallel=1"]
    assert arguments[arguments.index("train") - 1] == str(processes) and "run.steps=3" in arguments, arguments
    assert [w for w in split if w in arguments] == (split if processes == 1 else [])
    config = load_config(QUICKSTART, [word for word in arguments if "=" in word])
    assert config.saves_experience is not None and config.saves_experience.samples == 64, "inspect reads the samples"


def test_command_runs_from_any_folder(machine: Machine, tmp_path: Path) -> None:
    """The command also works through a link. Relative paths refer to the current folder. The settings determine the
    environment."""
    clone, elsewhere = machine.clone("one"), tmp_path / "else where"
    elsewhere.mkdir()
    (elsewhere / "run.yaml").write_text("rollout: {servers: {kind: sglang}}\n")
    (tmp_path / "bin" / "megappo").symlink_to(clone / "launch" / "megappo")
    for parts in (["plan", "run.yaml", "run.name=a b"], ["train", "run.yaml", "run.name=a b"]):
        lines = machine.output(clone, then=f'cd "{elsewhere}"; exec megappo {shlex.join(parts)}')
        assert lines[-7:] == [str(elsewhere), str(clone), "-m", "megappo", *parts], lines
    built = [line.split()[2] for line in machine.built()]
    assert built == ["light", "full"], "a plan must not need SGLang"


def test_builds_of_different_environments_run_in_parallel(machine: Machine) -> None:
    go = machine.folder / "go"
    scripts = [machine.start(machine.clone(name, name), waits_for=go) for name in ("one", "two")]
    machine.wait_for_builds(2)  # both builds start before one ends
    go.touch()
    assert [script.wait(timeout=60) for script in scripts] == [0, 0]


def test_killed_build_is_repeated(machine: Machine) -> None:
    clone, never = machine.clone("one"), machine.folder / "never"
    killed = machine.start(clone, waits_for=never)
    machine.wait_for_builds(1)
    os.killpg(killed.pid, signal.SIGKILL)
    assert (machine.use(clone) / "complete").exists()
    assert len(machine.built()) == 2


def test_prune_keeps_used_environments(machine: Machine) -> None:
    """An environment is kept if the clone, a running script or its children, or a mapped file uses it, or if it was
    used recently."""
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
        output = machine.prune(clones["own"])
    finally:
        mapped.kill()
        mapped.wait()
    assert {name for name, folder in folders.items() if folder.exists()} == {"own", "running", "mapped", "recent"}
    reasons = {"own": "this clone uses it", "running": "it is in use", "mapped": "it is in use"}
    for name, reason in (reasons | {"recent": "it was used in the last 7 days"}).items():
        assert f"kept     {folders[name]}: {reason}" in output
    assert f"removed  {folders['left']}:" in output
    go.touch()
    script.wait(timeout=60)
    assert f"removed  {folders['recent']}:" in machine.prune(clones["own"], "0")


def test_login_node_builds_environment_for_gpu_nodes(machine: Machine) -> None:
    """The login node has no GPU. The wheels come from one folder, and pip uses no index."""
    clone, wheels = machine.clone("one"), machine.folder / "my wheels"
    wheels.mkdir()
    done = machine.run(clone, "build", "--gpu", "--wheels", str(wheels))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"built {machine.use(clone, 'full')}; all nodes with access to this folder use it\n"
    assert len(machine.built()) == 1
    links = (machine.folder / "builds.wheels").read_text()
    assert links == f"1 file://{machine.folder}/my%20wheels\n"
    other = machine.clone("two", "two")
    assert machine.run(other, "build").stdout.startswith(f"built {machine.use(other, 'light')};")


@pytest.mark.parametrize(
    ("options", "variables", "sentence"),
    [
        (["build", "--wheels", "missing"], {}, "--wheels is 'missing', must be a folder with wheels"),
        (["build", "--wheels"], {}, "--wheels is '', must be a folder with wheels"),
        (["build"], {"MEGAPPO_PYTHON": "python3"}, "MEGAPPO_PYTHON is 'python3', so the scripts use this interpreter"),
        (["build", "--cpu"], {}, "usage: launch/environment.sh build [--gpu] [--wheels FOLDER] | prune [DAYS]"),
        ([], {}, "usage: launch/environment.sh build"),
    ],
)
def test_wrong_options_of_a_build(
    machine: Machine, options: list[str], variables: dict[str, str], sentence: str
) -> None:
    done = machine.run(machine.clone("one"), *options, **variables)
    assert done.returncode == 2 and sentence in done.stderr and not machine.builds.read_text()


def test_prune_requires_a_number_of_days(machine: Machine) -> None:
    assert "'all' is not a number of days; usage:" in machine.prune(machine.clone("one"), "all")
