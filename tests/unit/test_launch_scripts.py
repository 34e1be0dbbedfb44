"""The scripts in launch/, with stand-ins for what a cluster has and this machine does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCONTROL = """
case "$*" in
    "show hostnames"*) echo localhost ;;
    *) echo "JobId=7 JobState=RUNNING NodeName=localhost" ;;
esac
"""
WRITE_WORDS = 'for word in "$@"; do echo "$word"; done >>"$WORDS"'
ALL_WELL = 'for rank in $(seq 0 15); do echo 0 >"$MEGAPPO_RANK_LOGS/exit-$rank"; done'


class Site:
    """A folder with programs that stand before all others on PATH, and a job on two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.words = folder, folder / "words"
        (folder / "bin").mkdir()
        self.program("scontrol", SCONTROL)

    def program(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)

    def sbatch(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run the batch script as SLURM does on the first node."""
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
        job |= {"SLURM_SUBMIT_DIR": str(ROOT), "MEGAPPO_LOGS": str(self.folder / "logs"), "WORDS": str(self.words)}
        job |= {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "MEGAPPO_DOCTOR": "no"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MEGAPPO_"))}
        command = ["bash", str(ROOT / "launch" / "slurm" / "ppo.sbatch"), *words]
        return subprocess.run(
            command, env=kept | job | settings, capture_output=True, text=True, timeout=60, check=False
        )

    def log(self, name: str) -> str:
        return (self.folder / "logs" / "7" / "attempt-0" / name).read_text()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_pyxis(site: Site) -> None:
    site.program("srun", f"{WRITE_WORDS}; {ALL_WELL}")
    gpus = {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "96"}
    done = site.sbatch(
        "a.yaml", "run.name=two words", MEGAPPO_CONTAINER="nvcr#img:1", MEGAPPO_CONTAINER_MOUNTS="/data:/data", **gpus
    )
    assert done.returncode == 0, done.stderr
    words = site.words.read_text().splitlines()
    logs = site.folder / "logs" / "7" / "attempt-0"
    assert words[:9] == [
        "--nodes", "2", "--ntasks", "16", "--ntasks-per-node", "8", "--kill-on-bad-exit=1", "--cpus-per-task", "12",
    ]  # fmt: skip
    assert words[9:] == [
        "--gpu-bind=none", "--container-image=nvcr#img:1",
        f"--container-mounts={ROOT}:{ROOT},{logs}:{logs},/data:/data", f"--container-workdir={ROOT}",
        "bash", f"{ROOT}/launch/slurm/rank.sh", "train", "a.yaml", "run.name=two words",
    ]  # fmt: skip


def test_apptainer(site: Site) -> None:
    """The ranks run in the image, and write logs and exit codes outside of it."""
    site.program("srun", 'while [ "$1" != apptainer ]; do shift; done; SLURM_PROCID=0 exec "$@"')
    site.program("apptainer", f'{WRITE_WORDS}\nwhile [ "$1" != /images/a.sif ]; do shift; done; shift; exec "$@"')
    site.program("python", 'echo "python $*"')
    settings = {"MEGAPPO_CONTAINER": "/images/a.sif", "MEGAPPO_CONTAINER_RUNTIME": "apptainer"}
    done = site.sbatch("a.yaml", SLURM_GPUS_ON_NODE="1", SLURM_JOB_NUM_NODES="1", **settings)
    assert done.returncode == 0, done.stderr
    words = site.words.read_text().splitlines()
    assert words[:2] == ["exec", "--bind"]
    assert words[3:7] == ["--pwd", str(ROOT), "--nv", "/images/a.sif"]
    assert site.log("train/rank-0.log") == "python -m megappo train a.yaml\n"
    assert site.log("train/exit-0") == "0\n"


def test_modules_and_a_venv(site: Site) -> None:
    site.program("srun", 'SLURM_PROCID=0 exec bash "${@: -3:1}" "${@: -2}"')
    venv = site.folder / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text(f'PATH="{venv}/bin:$PATH"\necho "${{UNSET}}entered"\n')
    python = venv / "bin" / "python"
    python.write_text('#!/usr/bin/env bash\necho "venv $LOADED $SITE"\n')
    python.chmod(0o755)
    (site.folder / "site.sh").write_text("export SITE=here\n")
    module = '() { shift; export LOADED="$*"; }'  # as clusters define it: an exported shell function
    done = site.sbatch(
        "a.yaml", MEGAPPO_VENV=str(venv), MEGAPPO_MODULES="cuda/12 gcc", MEGAPPO_SITE=str(site.folder / "site.sh"),
        SLURM_JOB_NUM_NODES="1", **{"BASH_FUNC_module%%": module},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert site.log("train/rank-0.log") == "venv cuda/12 gcc here\n"


def test_conda(site: Site) -> None:
    site.program("srun", 'SLURM_PROCID=0 exec bash "${@: -3:1}" "${@: -2}"')
    site.program("conda", 'echo "conda() { export ENTERED=\\"\\$*\\"; }"')
    site.program("python", 'echo "$ENTERED"')
    done = site.sbatch("a.yaml", MEGAPPO_CONDA="ppo", SLURM_JOB_NUM_NODES="1")
    assert done.returncode == 0, done.stderr
    assert site.log("train/rank-0.log") == "activate ppo\n"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"MEGAPPO_LAUNCHER": "ray"}, "MEGAPPO_LAUNCHER is 'ray', must be srun or torchrun"),
        ({"MEGAPPO_RANKS_PER_NODE": "all"}, "MEGAPPO_RANKS_PER_NODE is 'all', must be a whole number"),
        ({"MEGAPPO_VENV": "/nowhere"}, "MEGAPPO_VENV '/nowhere' has no bin/activate; name its folder"),
        ({"MEGAPPO_MODULES": "cuda"}, "there is no command 'module'"),
        ({"MEGAPPO_CONTAINER": "x", "MEGAPPO_CONTAINER_RUNTIME": "docker"}, "is 'docker', must be pyxis or apptainer"),
        ({"SLURM_SUBMIT_DIR": "/tmp"}, "/tmp is not the repository; submit from there, or set MEGAPPO_ROOT to it"),
    ],
)
def test_wrong_settings(site: Site, settings: dict[str, str], words: str) -> None:
    site.program("srun", f"{WRITE_WORDS}; {ALL_WELL}")
    done = site.sbatch("a.yaml", **settings)
    assert done.returncode == 2
    assert words in done.stderr
    assert not site.words.exists()


def test_a_broken_machine_ends_the_job_before_training(site: Site) -> None:
    site.program("srun", f"{WRITE_WORDS}\nexit 1")
    done = site.sbatch("a.yaml", MEGAPPO_DOCTOR="yes", MEGAPPO_PYTHON=sys.executable)
    assert done.returncode == 2
    assert "megappo doctor found something broken; see" in done.stderr
    assert site.words.read_text().splitlines()[-2:] == ["doctor", "a.yaml"]


def torchrun(*words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"MEGAPPO_PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        ["bash", "launch/torchrun.sh", *words],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_torchrun_on_two_machines() -> None:
    """The same line on both, which here are one."""
    from helpers_broken import closed_port

    line = ("--nodes", "2", "--head", f"localhost:{closed_port()}", "1", "doctor")
    both = [torchrun(*line), torchrun(*line)]
    outputs = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "2 ranks met on" in "".join(out for out, _ in outputs)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "the processes per machine are ''"),
        (("--nodes", "2", "8", "train"), "--head is '', must be HOST:PORT"),
        (("--nodes", "two"), "--nodes is 'two', must be a whole number"),
        (("train", "a.yaml"), "the processes per machine are 'train'"),
    ],
)
def test_torchrun_usage(words: tuple[str, ...], said: str) -> None:
    process = torchrun(*words)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said in errors
