"""Commands in launch/ that build no environment: interpreters, the quickstart, and torchrun.sh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.network.store import listening_problem
from tests.support.harness import write_program
from tests.support.places import ROOT
from tests.support.worlds import closed_port

pytestmark = pytest.mark.waits


def run(command: list[str], folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder with additional variables."""
    environment = os.environ | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["python3.12", "./python3.12", "python-of-mine", "ABSOLUTE"])
def test_only_the_named_interpreter_is_used(tmp_path: Path, name: str) -> None:
    """Other interpreters in the same folder are not used. A name without a folder is searched in PATH."""
    for program in ("python3.12", "python-of-mine", "python"):
        write_program(tmp_path / program, f'#!/usr/bin/env bash\necho "{program} $*"\n')
    value = str(tmp_path / "python3.12") if name == "ABSOLUTE" else name
    environment = {"MEGAPPO_PYTHON": value, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for command, arguments in (("megappo", "-m megappo plan"), ("python", "plan")):
        done = run([str(ROOT / "launch" / command), "plan"], tmp_path, **environment)
        expected = "python-of-mine" if name == "python-of-mine" else "python3.12"
        assert done.stdout == f"{expected} {arguments}\n", done.stderr


@pytest.mark.parametrize("value", ["/nowhere/python", "no-such-python", "FOLDER", "TEXT"])
def test_invalid_interpreter_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "text").write_text("not a program")
    named = {"FOLDER": str(tmp_path), "TEXT": str(tmp_path / "text")}.get(value, value)
    done = run([str(ROOT / "launch/megappo"), "plan"], MEGAPPO_PYTHON=named)
    assert done.returncode == 2
    assert f"MEGAPPO_PYTHON is '{named}', must be an executable file; set it to the" in done.stderr


@pytest.mark.parametrize("command", ["megappo plan", "torchrun.sh 1 train", "quickstart.sh", "python"])
def test_interpreter_without_packages_is_refused(tmp_path: Path, command: str) -> None:
    """`python -S` has no site-packages."""
    bare = tmp_path / "bare"
    write_program(bare, f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    done = run(["bash", "-c", f"{ROOT}/launch/{command} a.yaml"], tmp_path, MEGAPPO_PYTHON=str(bare))
    assert done.returncode == 2
    assert done.stderr == (
        f"megappo: error: MEGAPPO_PYTHON is '{bare}', which has no torch, megatron, transformers, pydantic, yaml, "
        f"rich; run '{bare} -m pip install .' in the repository, or unset MEGAPPO_PYTHON\n"
    )


def test_exported_cdpath_has_no_effect() -> None:
    """With CDPATH, `cd` prints the new folder."""
    done = run(["bash", "-c", 'source launch/environment.sh; echo "$ROOT"'], CDPATH=f".:{ROOT.parent}")
    assert (done.returncode, done.stdout) == (0, f"{ROOT}\n")


@pytest.mark.parametrize(
    ("settings", "folder"),
    [(["run.directory=/tmp/a b", "run.name=x"], "/tmp/a b"), (["run.name=x", "run.directory='y'"], "y"),
     (["run.name=first"], "runs/first"), (["run.steps=1"], "runs/quickstart-")],
)  # fmt: skip
def test_quickstart_shows_the_run_that_it_trained(tmp_path: Path, settings: list[str], folder: str) -> None:
    python = tmp_path / "python"
    write_program(python, '#!/bin/sh\nprintf "%s\\n" "$*"\n')
    done = run(["bash", str(ROOT / "launch/quickstart.sh"), *settings], tmp_path, MEGAPPO_PYTHON=str(python))
    trained, shown = done.stdout.splitlines()
    assert shown.startswith(f"-m megappo report {folder}")
    assert ("run.directory=runs/quickstart-" in trained) == (settings == ["run.steps=1"])
    assert trained.endswith(" ".join(settings))


@pytest.mark.parametrize(("option", "code", "text"), [("--help", 0, "usage: "), ("--dry-run", 2, "is an option, but")])
def test_quickstart_accepts_only_settings(tmp_path: Path, option: str, code: int, text: str) -> None:
    done = run(["bash", str(ROOT / "launch/quickstart.sh"), option], tmp_path)
    assert done.returncode == code and text in done.stdout + done.stderr
    assert len((done.stdout + done.stderr).splitlines()) == 1


@pytest.mark.parametrize(
    ("gpus", "arguments", "kind"),
    [(True, ("train", "{}/engine.yaml"), "light"), (True, ("train", "{}/default.yaml"), "full"),
     (True, ("train", "{}/default.yaml", "rollout.engine=transformers"), "light"),
     (False, ("train", "{}/default.yaml"), "light"),
     (False, ("train", "{}/default.yaml", "rollout.servers.kind=sglang"), "full")],
)  # fmt: skip
def test_sglang_is_installed_if_default_engine_needs_sglang(
    gpus: bool, arguments: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    (tmp_path / "engine.yaml").write_text("rollout: {engine: transformers}\n")
    (tmp_path / "default.yaml").write_text("rollout: {prompts_per_step: 8}\n")
    write_program(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\nexit {0 if gpus else 9}\n")
    command = ["bash", "-c", 'source launch/environment.sh; environment_for "$@"', "bash"]
    command += [argument.format(tmp_path) for argument in arguments]
    done = run(command, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout.strip()) == (0, kind)


def torchrun(*args: str, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"MEGAPPO_PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"} | variables
    return subprocess.Popen(
        ["bash", "launch/torchrun.sh", *args],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


no_ipv6 = pytest.mark.skipif(listening_problem("::1", 0) is not None, reason="needs IPv6")


@pytest.mark.slow
@pytest.mark.parametrize(
    "host", [pytest.param("localhost", marks=pytest.mark.exhaustive), pytest.param("[::1]", marks=no_ipv6)]
)
def test_torchrun_on_two_machines(host: str) -> None:
    """Both machines run the same command. In this test, both are the same machine."""
    line = ("--nodes", "2", "--head", f"{host}:{closed_port()}", "1", "doctor")
    both = [torchrun(*line), torchrun(*line, MEGAPPO_IS_HEAD="no")]
    outputs = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "2 ranks met on" in "".join(out for out, _ in outputs)


def test_runs_of_two_users_have_different_ids(tmp_path: Path) -> None:
    """Two runs of one user have different IDs. The same command has the same ID on all machines."""
    programs = tmp_path / "bin"
    script = 'while [ $# -gt 0 ] && [ "$1" != --rdzv-id ]; do shift; done; echo "${2:-}"'
    write_program(programs / "python", f"#!/usr/bin/env bash\n{script}\n")

    def name(user: str, *args: str) -> str:
        write_program(programs / "id", f"#!/usr/bin/env bash\necho {user}\n")
        line = ("--nodes", "2", "--head", "node1:29500", "8", "train", *args)
        path = f"{programs}:{os.environ['PATH']}"
        process = torchrun(*line, PATH=path, MEGAPPO_PYTHON=str(programs / "python"))
        return process.communicate(timeout=60)[0].strip()

    mine = name("me", "a.yaml", "run.seed=1")
    assert mine.startswith("megappo-me-") and mine == name("me", "a.yaml", "run.seed=1")
    assert len({mine, name("other", "a.yaml", "run.seed=1"), name("me", "a.yaml", "run.seed=2")}) == 3


def test_torchrun_ignores_pet_variables(tmp_path: Path) -> None:
    """Kubeflow sets PET_*. With these variables, a command for one machine would wait for others and leave files."""
    python = tmp_path / "python-of-mine"
    write_program(python, "#!/usr/bin/env bash\nenv | grep ^PET_ || echo none\n")
    variables = {"PET_RDZV_ENDPOINT": "x:1", "PET_STANDALONE": "1", "PET_NNODES": "1:1", "PET_NPROC_PER_NODE": "4"}
    process = torchrun("2", "train", "a.yaml", MEGAPPO_PYTHON=str(python), **variables)
    assert process.communicate(timeout=60)[0] == "none\n"
    process = torchrun("2", "train", "a.yaml", PET_NNODES="2")
    assert "PET_NNODES is '2', and --nodes is 1; give --nodes" in process.communicate(timeout=60)[1]
    assert process.returncode == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "the processes per machine are ''"),
        (("--nodes", "2", "8", "train"), "--head is '', must be HOST:PORT"),
        (("--nodes", "2", "--head", "::1:29500", "8"), "--head is '::1:29500', must be HOST:PORT"),
        (("--nodes", "two"), "--nodes is 'two', must be a whole number"),
        (("train", "a.yaml"), "the processes per machine are 'train'"),
        (("2", "configs/quickstart.yaml"), "the command is missing; write 2 train configs/quickstart.yaml; usage:"),
        (("2",), "the command is missing; write 2 train CONFIG; usage:"),
    ],
)
def test_torchrun_usage(args: tuple[str, ...], message: str) -> None:
    process = torchrun(*args)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert message in errors
