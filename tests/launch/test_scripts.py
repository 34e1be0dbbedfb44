"""Tests of the scripts in launch/, with test programs for the commands of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import write_program
from tests.support.places import ROOT

pytestmark = pytest.mark.waits

SCONTROL = """
case "$*" in
    "show hostnames"*) echo localhost ;;
    *) echo "JobId=7 JobState=RUNNING NodeName=localhost" ;;
esac
"""
WRITE_ARGS = 'for word in "$@"; do echo "$word"; done >>"$ARGS"'
ALL_WELL = 'for rank in $(seq 0 15); do echo 0 >"$MEGAPPO_RANK_LOGS/exit-$rank"; done'


class Site:
    """A folder with test programs that come first in PATH, and a job on two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.args_file = folder, folder / "words"
        (folder / "bin").mkdir()
        self.program("scontrol", SCONTROL)

    def program(self, name: str, script: str) -> None:
        write_program(self.folder / "bin" / name, f"#!/usr/bin/env bash\n{script}\n")

    def sbatch(self, *args: str, script: str = "ppo.sbatch", **settings: str) -> subprocess.CompletedProcess[str]:
        """Run the batch script like SLURM on the first node."""
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
        job |= {"SLURM_SUBMIT_DIR": str(ROOT), "MEGAPPO_LOGS": str(self.folder / "logs"), "ARGS": str(self.args_file)}
        job |= {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "MEGAPPO_DOCTOR": "no"}
        job |= {"MEGAPPO_CACHE": str(self.folder / "cache")}  # errors must not change other environments
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MEGAPPO_"))}
        command = ["bash", str(ROOT / "launch" / "slurm" / script), *args]
        variables = environment | job | settings
        return subprocess.run(
            command, cwd=variables["SLURM_SUBMIT_DIR"], env=variables, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip

    def arguments(self, *args: str, **settings: str) -> list[str]:
        """Run a batch script that succeeds, and return the arguments that the test programs received."""
        done = self.sbatch(*args, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.args_file.read_text().splitlines() if self.args_file.exists() else []

    def log(self, name: str) -> str:
        return (self.folder / "logs" / "7" / "attempt-0" / name).read_text()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_pyxis(site: Site) -> None:
    site.program("srun", f"{WRITE_ARGS}; {ALL_WELL}")
    gpus = {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "96"}
    container = {"MEGAPPO_CONTAINER": "nvcr#img:1", "MEGAPPO_CONTAINER_MOUNTS": "/data:/data"}
    args = site.arguments("a.yaml", "run.name=two words", **container, **gpus)
    logs = site.folder / "logs" / "7" / "attempt-0"
    assert args[:11] == [
        "--job-name", "train", "--nodes", "2", "--ntasks", "16", "--ntasks-per-node", "8", "--kill-on-bad-exit=1",
        "--cpus-per-task", "12",
    ]  # fmt: skip
    assert args[11:] == [
        "--gpu-bind=none", "--container-image=nvcr#img:1",
        f"--container-mounts={ROOT}:{ROOT},{logs}:{logs},/data:/data", f"--container-workdir={ROOT}",
        "bash", f"{ROOT}/launch/slurm/rank.sh", "train", "a.yaml", "run.name=two words",
    ]  # fmt: skip


def test_apptainer(site: Site) -> None:
    """The ranks run in the image, and write logs and exit codes outside of the image."""
    site.program("srun", 'while [ "$1" != apptainer ]; do shift; done; SLURM_PROCID=0 exec "$@"')
    site.program("apptainer", f'{WRITE_ARGS}\nwhile [ "$1" != /images/a.sif ]; do shift; done; shift; exec "$@"')
    site.program("python", 'echo "python $*"')
    settings = {"MEGAPPO_CONTAINER": "/images/a.sif", "MEGAPPO_CONTAINER_RUNTIME": "apptainer"}
    args = site.arguments("a.yaml", SLURM_GPUS_ON_NODE="1", SLURM_JOB_NUM_NODES="1", **settings)
    assert args[:2] == ["exec", "--bind"]
    assert args[3:7] == ["--pwd", str(ROOT), "--nv", "/images/a.sif"]
    assert site.log("train/rank-0.log") == "python -m megappo train a.yaml\n"
    assert site.log("train/exit-0") == "0\n"


@pytest.mark.parametrize("script", ["ppo.sbatch", "ppo_disaggregated.sbatch", "acceptance.sbatch"])
def test_job_stays_in_the_folder_of_its_submission(site: Site, script: str) -> None:
    """The configuration has relative paths of data and runs, and the repository may be read-only."""
    folder = site.folder / "my dir"
    folder.mkdir()
    (folder / "site.sh").write_text("")
    site.program("srun", 'pwd >"$ARGS"; exit 1')
    settings = {"SLURM_SUBMIT_DIR": str(folder), "MEGAPPO_ROOT": str(ROOT), "MEGAPPO_SITE": "site.sh"}
    settings |= {"MEGAPPO_LOGS": "logs", "MEGAPPO_PYTHON": sys.executable, "MEGAPPO_ENGINE_NODES": "1"}
    done = site.sbatch("a.yaml", script=script, **settings)
    assert site.args_file.read_text() == f"{folder}\n", done.stderr
    assert (folder / "logs/7/attempt-0/job.txt").exists()


def test_container_has_the_folder_of_the_job(site: Site) -> None:
    site.program("srun", f"{WRITE_ARGS}; {ALL_WELL}")
    folder = site.folder / "my dir"
    folder.mkdir()
    done = site.sbatch("a.yaml", SLURM_SUBMIT_DIR=str(folder), MEGAPPO_ROOT=str(ROOT), MEGAPPO_CONTAINER="image")
    args = site.args_file.read_text().splitlines()
    assert f"--container-workdir={folder}" in args, done.stderr
    assert any(word.startswith(f"--container-mounts={folder}:{folder},{ROOT}:{ROOT},") for word in args)


@pytest.mark.parametrize("script", ["ppo.sbatch", "ppo_disaggregated.sbatch", "acceptance.sbatch"])
def test_batch_script_without_a_job_names_sbatch(site: Site, script: str) -> None:
    done = site.sbatch("a.yaml", script=script, SLURM_JOB_ID="")
    assert done.returncode == 2
    assert done.stderr.startswith(f"megappo: error: {script} runs as a SLURM job; submit it with sbatch, or train on ")


def test_modules_and_a_venv(site: Site) -> None:
    site.program("srun", 'SLURM_PROCID=0 exec bash "${@: -3:1}" "${@: -2}"')
    venv = site.folder / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text(f'PATH="{venv}/bin:$PATH"\necho "${{UNSET}}entered"\n')
    write_program(venv / "bin" / "python", '#!/usr/bin/env bash\necho "venv $LOADED $SITE"\n')
    (site.folder / "site.sh").write_text("export SITE=here\n")
    module = '() { shift; export LOADED="$*"; }'  # clusters define an exported shell function
    site.arguments(
        "a.yaml", MEGAPPO_VENV=str(venv), MEGAPPO_MODULES="cuda/12 gcc", MEGAPPO_SITE=str(site.folder / "site.sh"),
        SLURM_JOB_NUM_NODES="1", **{"BASH_FUNC_module%%": module},
    )  # fmt: skip
    assert site.log("train/rank-0.log") == "venv cuda/12 gcc here\n"


def test_conda(site: Site) -> None:
    site.program("srun", 'SLURM_PROCID=0 exec bash "${@: -3:1}" "${@: -2}"')
    site.program("conda", 'echo "conda() { export ENTERED=\\"\\$*\\"; }"')
    site.program("python", 'echo "$ENTERED"')
    site.arguments("a.yaml", MEGAPPO_CONDA="ppo", SLURM_JOB_NUM_NODES="1")
    assert site.log("train/rank-0.log") == "activate ppo\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"MEGAPPO_LAUNCHER": "ray"}, "MEGAPPO_LAUNCHER is 'ray', must be srun or torchrun"),
        ({"MEGAPPO_RANKS_PER_NODE": "all"}, "MEGAPPO_RANKS_PER_NODE is 'all', must be a whole number"),
        ({"MEGAPPO_VENV": "/nowhere"}, "MEGAPPO_VENV '/nowhere' has no bin/activate; name its folder"),
        ({"MEGAPPO_MODULES": "cuda"}, "there is no command 'module'"),
        ({"MEGAPPO_CONTAINER": "x", "MEGAPPO_CONTAINER_RUNTIME": "docker"}, "is 'docker', must be pyxis or apptainer"),
        ({"MEGAPPO_SITE": "/tmp"}, "MEGAPPO_SITE is '/tmp', must be a readable file; name one, or unset"),
        ({"MEGAPPO_SITE": "/missing.sh"}, "MEGAPPO_SITE is '/missing.sh', must be a readable file; name one,"),
        (
            {"MEGAPPO_PYTHON": "/missing/python"},
            "MEGAPPO_PYTHON is '/missing/python', must be an executable file; set it to the",
        ),
        ({"MEGAPPO_PYTHON": "no-such-python"}, "MEGAPPO_PYTHON is 'no-such-python', must be an executable file"),
        ({"SLURM_SUBMIT_DIR": "/tmp"}, "/tmp is not the repository; submit from there, or set MEGAPPO_ROOT to it"),
    ],
)
def test_wrong_settings(site: Site, settings: dict[str, str], message: str) -> None:
    site.program("srun", f"{WRITE_ARGS}; {ALL_WELL}")
    done = site.sbatch("a.yaml", **settings)
    assert done.returncode == 2
    assert message in done.stderr
    assert not site.args_file.exists()


@pytest.mark.parametrize(
    ("settings", "ranks", "warning"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, 8, ""),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "8"}, 8, ""),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2, ""),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 1,
         "a node has 8 GPUs and 1 ranks, so no rank uses 7 of the GPUs"),
        ({"SLURM_GPUS_ON_NODE": "8", "MEGAPPO_RANKS_PER_NODE": "4"}, 4, "no rank uses 4 of the GPUs"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "1", "MEGAPPO_LAUNCHER": "torchrun"}, 8, ""),
        ({"SLURM_NTASKS_PER_NODE": "1", "MEGAPPO_LAUNCHER": "torchrun"}, 1, ""),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "4", "MEGAPPO_LAUNCHER": "torchrun"}, 4, "4 of the"),
    ],
)  # fmt: skip
def test_ranks_per_node(site: Site, settings: dict[str, str], ranks: int, warning: str) -> None:
    """A torchrun job with one task per node starts one rank per GPU. GPUs without a rank are reported."""
    site.program("srun", f"{WRITE_ARGS}; {ALL_WELL}")
    done = site.sbatch("a.yaml", MEGAPPO_PYTHON=sys.executable, **settings)
    args = site.args_file.read_text().splitlines()
    of_node = args[args.index("--ntasks-per-node") + 1]
    if settings.get("MEGAPPO_LAUNCHER") == "torchrun":
        assert of_node == "1" and args[args.index(str(ROOT / "launch/slurm/node.sh")) + 1 :][:2] == ["2", str(ranks)]
    else:
        assert of_node == str(ranks)
    assert warning in done.stderr and ("megappo: warning" in done.stderr) == bool(warning)


def test_site_file_can_read_unset_variables(site: Site) -> None:
    """Typical commands in the file of a site must work."""
    exports = site.folder / "site.sh"
    exports.write_text("export SITE_PATH=/x:$NOT_SET_ANYWHERE\n[ -d /nowhere ] && echo never\n")
    python = site.folder / "bin" / "python-of-mine"
    site.program(python.name, 'echo "path $SITE_PATH"')
    site.program("srun", 'SLURM_PROCID=0 bash "${@: -3}"; echo 0 >"$MEGAPPO_RANK_LOGS/exit-1"')
    own = {"MEGAPPO_PYTHON": str(python), "MEGAPPO_SITE": str(exports)}
    site.arguments("a.yaml", **own, MEGAPPO_RANKS_PER_NODE="1")
    assert site.log("train/rank-0.log") == "path /x:\n"


def test_rank_reports_missing_site_file(site: Site, tmp_path: Path) -> None:
    """The file may exist only on the first node."""
    environment = os.environ | {"MEGAPPO_SITE": "/missing.sh", "MEGAPPO_RANK_LOGS": str(tmp_path), "RANK": "3"}
    done = subprocess.run(["bash", str(ROOT / "launch/slurm/rank.sh"), "train"], env=environment, check=False)
    assert done.returncode == 2 and (tmp_path / "exit-3").read_text() == "2\n"
    assert "MEGAPPO_SITE is '/missing.sh', must be a readable file on" in (tmp_path / "rank-3.log").read_text()


@pytest.mark.parametrize("has_file", [True, False])
def test_engine_reads_the_site_file(site: Site, tmp_path: Path, has_file: bool) -> None:
    exports = tmp_path / "site.sh"
    if has_file:
        exports.write_text("export SITE_PATH=/x:$NOT_SET_ANYWHERE\nfalse\n")
    site.program("python-of-mine", 'echo "1 2 $SITE_PATH"')
    variables = {"MEGAPPO_PYTHON": str(site.folder / "bin/python-of-mine"), "MEGAPPO_SITE": str(exports)}
    command = ["bash", str(ROOT / "launch/slurm/engine.sh"), "describe", "a.yaml"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    if has_file:
        assert done.stdout.startswith("1 2 /x: ") and done.returncode == 0, done.stderr
    else:
        assert done.returncode == 2 and f"MEGAPPO_SITE is '{exports}', must be a readable file on" in done.stderr


def test_torchrun_of_a_node_ignores_scheduler_options(site: Site, tmp_path: Path) -> None:
    site.program("python-of-mine", 'env | grep ^PET_ >"$ARGS" || echo none >"$ARGS"')
    variables = {
        "MEGAPPO_PYTHON": str(site.folder / "bin/python-of-mine"), "MEGAPPO_RANK_LOGS": str(tmp_path),
        "SLURM_NODEID": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "ARGS": str(site.args_file),
        "PET_STANDALONE": "1", "PET_NNODES": "2",
    }  # fmt: skip
    command = ["bash", str(ROOT / "launch/slurm/node.sh"), "1", "1", "train", "a.yaml"]
    subprocess.run(command, env=os.environ | variables, timeout=60, check=False)
    assert site.args_file.read_text() == "none\n"


def test_doctor_error_ends_the_job_before_training(site: Site) -> None:
    site.program("srun", f"{WRITE_ARGS}\nexit 1")
    done = site.sbatch("a.yaml", MEGAPPO_DOCTOR="yes", MEGAPPO_PYTHON=sys.executable)
    assert done.returncode == 2
    assert "megappo doctor found something broken; see" in done.stderr
    assert site.args_file.read_text().splitlines()[-2:] == ["doctor", "a.yaml"]


def run_until_ranks_end(site: Site, *ranks: tuple[int, int, str]) -> subprocess.CompletedProcess[str]:
    """Run a job whose ranks end one after the other. Each rank is given as number, exit code and last log line."""
    end = 'sleep 0.1; echo {1} >"$MEGAPPO_RANK_LOGS/exit-{0}"; echo "{2}" >>"$MEGAPPO_RANK_LOGS/rank-{0}.log"'
    worst = min(code for _, code, _ in ranks)  # the code of a signal is larger
    site.program("srun", "; ".join([*(end.format(*rank) for rank in ranks), f"exit {worst}"]))
    return site.sbatch("a.yaml", MEGAPPO_PYTHON=sys.executable)


def test_cause_is_shown_for_any_rank(site: Site) -> None:
    """A killed rank writes no message. The other ranks report their own errors, including rank 0, whose log is
    shown."""
    done = run_until_ranks_end(site, (5, 137, "step 1"), (0, 1, "megappo: error: another rank ended"))
    assert done.returncode == 1
    assert "megappo: error: rank 5 ended first, by SIGKILL; see " in done.stdout
    assert done.stdout.count("another rank ended") == 1


def test_cause_is_shown_without_message_of_rank_0(site: Site) -> None:
    done = run_until_ranks_end(site, (3, 2, "megappo: error on rank 3: no such file"), (0, 143, "step 1"))
    assert done.returncode == 2
    assert "megappo: error on rank 3: no such file" in done.stdout and "ended first" not in done.stdout


DISAGGREGATED = "ppo_disaggregated.sbatch"
ENGINES = """
case "$*" in
    *"engine.sh describe"*) echo "$DESCRIBED" ;;
    *"engine.sh serve"*)
        echo "ports $MEGAPPO_ENGINE_PORTS key ${#MEGAPPO_SGLANG_API_KEY}" >>"$ARGS"
        echo "listening at ${MEGAPPO_ENGINE_HOST:-$MEGAPPO_ENGINE_ADDRESSES}" >>"$ARGS"
        if [ -n "${DEAD:-}" ]; then echo "out of memory" >"$MEGAPPO_RANK_LOGS/engine-0.log"; exit 1; fi
        while [ ! -e "$MEGAPPO_RANK_LOGS/stopping" ]; do sleep 0.1; done
        ;;
    *)
        if [ -n "${DEAD:-}" ]; then while [ ! -e "$ARGS.stopped" ]; do sleep 0.1; done; exit 1; fi
        for rank in $(seq 0 15); do echo 0 >"$MEGAPPO_RANK_LOGS/exit-$rank"; done
        ;;
esac
"""
GPUS = {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "96", "SLURM_JOB_NUM_NODES": "3", "MEGAPPO_ENGINE_NODES": "1"}
GPUS |= {"MEGAPPO_PYTHON": sys.executable}


def engine_site(site: Site) -> None:
    site.program("srun", f"{WRITE_ARGS}\n{ENGINES}")
    site.program("squeue", 'echo "7.2 train"')
    site.program("scancel", 'echo "scancel $*" >>"$ARGS"; touch "$ARGS.stopped"')


def test_engines_share_the_gpus_of_a_node(site: Site) -> None:
    """TP2 on nodes of eight GPUs: four engines with separate ports. The key is only in the environment."""
    engine_site(site)
    done = site.sbatch("a.yaml", script=DISAGGREGATED, DESCRIBED="1 2 8 96", **GPUS)
    args = site.args_file.read_text().splitlines()
    urls = next(argument for argument in args if argument.startswith("rollout.servers.urls=['http"))
    ports = next(line for line in args if line.startswith("ports ")).split()
    assert ports[-2:] == ["key", "64"] and len(set(ports[1:-2])) == 4
    listed = "".join(f"'http://localhost:{port}'," for port in ports[1:-2])
    assert urls == f"rollout.servers.urls=[{listed}]"
    assert {"listening at 127.0.0.1 ", "listening at ::1 "} & set(args), "engines must listen at localhost"
    start = args.index("engines")
    assert args[start - 3 : start + 11] == [
        "--relative", "2", "--job-name", "engines", "--nodes", "1", "--ntasks", "4", "--ntasks-per-node", "4",
        "--distribution=block", "--kill-on-bad-exit=1", "--cpus-per-task", "24",
    ]  # fmt: skip
    assert args[args.index("train") - 3 : args.index("train")] == ["--relative", "0", "--job-name"]
    assert done.returncode == 0 and "16 ranks on 2 of the nodes, 4 engines on localhost" in done.stdout, done.stderr


def test_engine_runs_on_several_nodes(site: Site) -> None:
    """TP16 on two nodes of eight GPUs: the nodes share one URL and one rendezvous address."""
    engine_site(site)
    site.program("scontrol", SCONTROL.replace("echo localhost", "echo localhost; echo localhost"))
    settings = GPUS | {"MEGAPPO_ENGINE_NODES": "2", "SLURM_JOB_NUM_NODES": "4", "DESCRIBED": "2 8 8 96"}
    args = site.arguments("a.yaml", script=DISAGGREGATED, **settings)
    ports = next(line for line in args if line.startswith("ports ")).split()
    assert f"rollout.servers.urls=['http://localhost:{ports[1]}',]" in args and "rollout.servers.nodes=1" in args
    assert len(ports) == 4
    start = args.index("engines")
    assert args[start + 1 : start + 7] == ["--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1"]


@pytest.mark.parametrize(
    ("place", "host", "expected"),
    [
        (("0", "1"), "", "10.0.0.1 --port 12 --index 1 --linger 5 --part 0 --meet n0:22"),
        (("1", "1"), "", "10.0.0.2 --port 0 --index 1 --linger 5 --part 1 --meet n0:22"),
        (("3", "0"), "", "10.0.0.4 --port 0 --index 2 --linger 5 --part 1 --meet n2:23"),
        (("3", "0"), "0.0.0.0", "0.0.0.0 --port 0 --index 2 --linger 5 --part 1 --meet n2:23"),
    ],
)
def test_task_runs_one_part_of_an_engine(site: Site, place: tuple[str, str], host: str, expected: str) -> None:
    """Each node has two engine parts of four GPUs. The parts listen at the address of their node, or at the address in
    `MEGAPPO_ENGINE_HOST`."""
    site.program("python", 'echo "$*"')
    environment = os.environ | {
        "SLURM_NODEID": place[0], "SLURM_LOCALID": place[1], "MEGAPPO_ENGINE_WIDTH": "2", "MEGAPPO_ENGINE_RANKS": "4",
        "MEGAPPO_ENGINES_OF_NODE": "2", "MEGAPPO_ENGINE_PORTS": "11 12 13 14", "MEGAPPO_ENGINE_HOST": host,
        "MEGAPPO_ENGINE_ADDRESSES": "10.0.0.1 10.0.0.2 10.0.0.3 10.0.0.4 ",
        "MEGAPPO_ENGINE_MEETINGS": "n0:21 n0:22 n2:23 n2:24", "MEGAPPO_ENGINE_LINGER": "5",
        "MEGAPPO_RANK_LOGS": str(site.folder), "PATH": f"{site.folder / 'bin'}:{os.environ['PATH']}",
    }  # fmt: skip
    subprocess.run(["bash", "launch/slurm/engine.sh", "serve", "a.yaml"], cwd=ROOT, env=environment, check=True)
    (log,) = site.folder.glob("engine-*.log")
    first = 4 * int(place[1])
    assert log.read_text() == f"-m megappo serve a.yaml rollout.servers.first_device={first} --host {expected}\n"
    assert log.name == f"engine-{expected.split()[4]}{'-part-1' if 'part 1' in expected else ''}.log"


def test_heterogeneous_job_places_steps_by_component(site: Site) -> None:
    engine_site(site)
    het = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_1": "n3", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1"}
    settings = GPUS | het | {"MEGAPPO_ENGINE_NODES": "", "SLURM_JOB_NUM_NODES": "2", "DESCRIBED": "1 8 8 96"}
    args = site.arguments("a.yaml", script=DISAGGREGATED, **settings)
    assert args[args.index("engines") - 2] == "--het-group=1" and args[args.index("train") - 2] == "--het-group=0"


def test_end_of_engines_stops_the_trainers(site: Site) -> None:
    engine_site(site)
    done = site.sbatch("a.yaml", script=DISAGGREGATED, DESCRIBED="1 2 8 96", DEAD="yes", **GPUS)
    assert done.returncode == 1
    assert "the step of the engines ended (exit code 1), so the trainers are stopped" in done.stderr
    assert "out of memory" in done.stderr
    assert "scancel --signal=TERM 7.2" in site.args_file.read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"MEGAPPO_ENGINE_NODES": ""}, "MEGAPPO_ENGINE_NODES is '', must be a whole number from 1 to 2 of the job's 3"),
        ({"MEGAPPO_ENGINE_NODES": "3"}, "MEGAPPO_ENGINE_NODES is '3', must be"),
        ({"DESCRIBED": "1 16 8 96"}, "0 engines of rollout.servers.tensor_parallel 16 do not fit on 1 nodes of 8 GPUs"),
        ({"DESCRIBED": "2 8 8 96"}, "1 engine nodes are not a multiple of rollout.servers.nodes 2"),
        (
            {"MEGAPPO_ENGINES_PER_NODE": "5"},
            "5 engines of rollout.servers.tensor_parallel 2 do not fit on 1 nodes of 8",
        ),
        (
            {"SLURM_JOB_NODELIST_HET_GROUP_1": "n3", "SLURM_HET_SIZE": "3"},
            "the job has 3 components, must have two: trainers : engines",
        ),
    ],
)
def test_wrong_settings_of_engines(site: Site, settings: dict[str, str], message: str) -> None:
    engine_site(site)
    done = site.sbatch("a.yaml", script=DISAGGREGATED, **({"DESCRIBED": "1 2 8 96"} | GPUS | settings))
    assert done.returncode == 2
    assert message in done.stderr
    assert "train" not in (site.args_file.read_text().splitlines() if site.args_file.exists() else [])


@pytest.mark.parametrize(
    ("end", "variables", "expected"),
    [("1764200000", {}, "1764200000"), ("Unknown", {}, ""), ("1", {"SLURM_JOB_END_TIME": "2"}, "2")],
)
def test_ranks_receive_end_time_of_slurm_job(site: Site, end: str, variables: dict[str, str], expected: str) -> None:
    """If SLURM does not set the variable, the end time is read with scontrol."""
    condition = '[ "$1 $2" != "--oneliner show" ] || [ "$SLURM_TIME_FORMAT" != %s ]'
    site.program("scontrol", f'{condition} || echo "JobId=7 EndTime={end} Requeue=1"\n{SCONTROL}')
    two_ranks = ALL_WELL.replace("15", "1")
    site.program("srun", f'echo "end: $SLURM_JOB_END_TIME" >>"$ARGS"\n{two_ranks}')
    assert site.arguments("some.yaml", MEGAPPO_PYTHON=sys.executable, **variables) == [f"end: {expected}"]


def test_record_of_a_job_contains_no_secret(site: Site) -> None:
    """Variables that can contain secrets are omitted. Credentials in addresses are masked. Others cannot read the
    file."""
    site.program("scontrol", f'{SCONTROL}echo "Command=train data=https://me:c0mmand@host/x"')
    site.program("srun", ALL_WELL)
    secret = {
        "DATABASE_URL": "postgres://me:s3cret@db/x", "GH_PAT": "s3cret", "ORACLE_PWD": "s3cret", "SLURM_JWT": "s3cret",
        "MEGAPPO_SGLANG_API_KEY": "s3cret", "WANDB_API_KEY": "s3cret", "MY_NOTES": "line\nPATH=s3cret",
        "http_proxy": "http://me:s3@cret@proxy:3128", "HTTPS_PROXY": "me:s3cret@proxy:3128",
        "NCCL_TEST_URL": "'http://me:s3cret@host', x", "CONDA_PASSWORD": "s3cret",
    }  # fmt: skip
    plain = {
        "SLURM_GPUS_ON_NODE": "8", "NCCL_SOCKET_IFNAME": "ib0", "SLURM_JOB_PARTITION": "gpu", "OMP_NUM_THREADS": "3",
    }  # fmt: skip
    site.arguments("a.yaml", MEGAPPO_PYTHON=sys.executable, **secret, **plain)
    record = site.log("job.txt")
    assert not [word for word in ("s3cret", "cret@", "c0mmand", "me:") if word in record], record
    for line in (
        "NCCL_SOCKET_IFNAME=ib0", "SLURM_JOB_PARTITION=gpu", "OMP_NUM_THREADS=3", "HTTPS_PROXY=***@proxy:3128",
        "http_proxy=***@proxy:3128", "NCCL_TEST_URL='http://***@host', x", "Command=train data=https://***@host/x",
    ):  # fmt: skip
        assert line in record.splitlines(), record
    assert (site.folder / "logs" / "7" / "attempt-0" / "job.txt").stat().st_mode & 0o777 == 0o600
