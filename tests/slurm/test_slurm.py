"""Real SLURM: jobs on two virtual nodes have the same results as torchrun, and are requeued on request."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SHORT, await_text, end_of_second_attempt, job_environment, numbers
from tests.support.harness import succeed
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]


@pytest.fixture(scope="module")
def torchrun_metrics(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the metrics of the same run with torchrun."""
    directory = tmp_path_factory.mktemp("torchrun") / "run"
    succeed("megappo", "train", "configs/quickstart.yaml", f"run.directory={directory}", *SHORT, processes=2)
    return numbers(directory)


def submit(cluster: Cluster, folder: Path, *arguments: str, flags: tuple[str, ...] = (), **settings: object) -> int:
    """Submit `launch/slurm/ppo.sbatch` on both nodes and return the job ID."""
    environment = job_environment(cluster, MEGAPPO_LOGS=folder / "logs", **settings)
    command = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={folder}/job.out", *flags]
    return int(cluster.run(*command, "launch/slurm/ppo.sbatch", *arguments, cwd=ROOT, env=environment).strip())


@pytest.mark.parametrize("launcher", [pytest.param("srun", marks=pytest.mark.exhaustive), "torchrun"])
def test_job_on_two_nodes_equals_torchrun(
    cluster: Cluster, torchrun_metrics: list[dict[str, Any]], tmp_path: Path, launcher: str
) -> None:
    arguments = ("configs/quickstart.yaml", f"run.directory={tmp_path / 'run'}", *SHORT)
    doctor = "yes" if launcher == "srun" else "no"
    job = submit(cluster, tmp_path, *arguments, MEGAPPO_LAUNCHER=launcher, MEGAPPO_DOCTOR=doctor, HF_TOKEN="hidden")
    state = cluster.wait(job, "COMPLETED", "FAILED", "NODE_FAIL")
    assert state["JobState"] == "COMPLETED", cluster.log(state)
    assert numbers(tmp_path / "run") == torchrun_metrics
    logs = tmp_path / "logs" / str(job) / "attempt-0"
    assert [(logs / "train" / f"exit-{rank}").read_text() for rank in (0, 1)] == ["0\n", "0\n"]
    assert (logs / "train" / "rank-1.log").exists()
    output = Path(
        state["StdOut"]
    ).read_text()  # the end of the output can contain messages of torchrun agents that lose the connection
    assert "2 ranks on n[1-2]" in output
    assert "reward" in output  # the output of rank 0 is part of the output of the job
    record = (logs / "job.txt").read_text()
    assert "SLURM_JOB_NODELIST=n[1-2]" in record
    assert "hidden" not in record


def test_ranks_start_with_srun_only(cluster: Cluster, torchrun_metrics: list[dict[str, Any]], tmp_path: Path) -> None:
    """The ranks are started without a script and torchrun. No name server can resolve the names of the nodes."""
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = ["srun", "--nodes=2", "--ntasks=2", sys.executable, "-m", "megappo", "train", "configs/quickstart.yaml"]
    arguments = (f"run.directory={tmp_path / 'run'}", *SHORT)
    cluster.run(*command, *arguments, cwd=ROOT, env=cluster.environment | paths, timeout=300)
    assert numbers(tmp_path / "run") == torchrun_metrics


def fake_python(folder: Path, script: str) -> Path:
    """Write a `python` program that runs the script for `-m megappo`. Return the path for MEGAPPO_PYTHON."""
    path = folder / "bin" / "python"
    path.parent.mkdir()
    others = f'if [ "$2" != megappo ]; then exec {sys.executable} "$@"; fi'
    path.write_text(f"#!/usr/bin/env bash\n{others}\n{script}\n")
    path.chmod(0o755)
    return path


PREEMPTED = """
trap 'echo stop requested; exit 85' USR1
echo "attempt ${SLURM_RESTART_COUNT:-0}: $*"
if [ "${SLURM_RESTART_COUNT:-0}" = 1 ]; then exit 0; fi
for _ in $(seq 600); do sleep 0.1; done
exit 3
"""


@pytest.mark.parametrize("launcher", [pytest.param("srun", marks=pytest.mark.exhaustive), "torchrun"])
def test_preempted_job_is_requeued(cluster: Cluster, tmp_path: Path, launcher: str) -> None:
    """The signal of --signal reaches every rank. Exit code 85 requeues the job."""
    python = fake_python(tmp_path, PREEMPTED)
    job = submit(
        cluster, tmp_path, "some.yaml", "run.steps=3",
        MEGAPPO_PYTHON=python, MEGAPPO_DOCTOR="no", MEGAPPO_LAUNCHER=launcher,
    )  # fmt: skip
    logs = tmp_path / "logs" / str(job)
    for rank in (0, 1):
        await_text(
            logs / "attempt-0" / "train" / f"rank-{rank}.log", "attempt 0: -m megappo train some.yaml run.steps=3"
        )
    cluster.run("scancel", "--signal=USR1", str(job))
    state = end_of_second_attempt(cluster, job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cluster.log(state)
    for rank in (0, 1):
        assert "stop requested" in (logs / "attempt-0" / "train" / f"rank-{rank}.log").read_text()
        assert (logs / "attempt-0" / "train" / f"exit-{rank}").read_text() == "85\n"
        assert "attempt 1" in (logs / "attempt-1" / "train" / f"rank-{rank}.log").read_text()
    assert "back into the queue" in cluster.log(state)


@pytest.mark.exhaustive
def test_interrupted_job_has_the_same_metrics(cluster: Cluster, tmp_path: Path) -> None:
    """Real training: the signal of --signal interrupts the run, and the second attempt completes the same metrics."""
    more = (*SHORT, "run.steps=20")
    succeed("megappo", "train", "configs/quickstart.yaml", f"run.directory={tmp_path / 'whole'}", *more, processes=2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    job = submit(
        cluster, tmp_path, "configs/quickstart.yaml", f"run.directory={metrics.parent}", *more, MEGAPPO_DOCTOR="no"
    )
    await_text(metrics, '"step": 2,', 240)
    cluster.run("scancel", "--signal=USR1", str(job))
    await_text(tmp_path / "job.out", "back into the queue", 120)
    assert 2 <= len(numbers(metrics.parent)) < 20
    state = end_of_second_attempt(cluster, job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cluster.log(state)
    assert "continuing after step" in cluster.log(state) and "2 ranks on n[1-2]" in Path(state["StdOut"]).read_text()
    assert numbers(metrics.parent) == numbers(tmp_path / "whole")
    logs = tmp_path / "logs" / str(job) / "attempt-1"
    assert [(logs / "train" / f"exit-{rank}").read_text() for rank in (0, 1)] == ["0\n", "0\n"]


def test_job_at_the_time_limit_is_requeued(
    cluster: Cluster, torchrun_metrics: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The time limit of the job is too short for a second step and a stop. The run ends without a signal, with a
    checkpoint. The job is requeued, and the next attempt runs the last step."""
    arguments = ("configs/quickstart.yaml", f"run.directory={tmp_path / 'run'}", *SHORT)
    job = submit(cluster, tmp_path, *arguments, flags=("--time=1", "--signal=USR1@0"), MEGAPPO_DOCTOR="no")
    state = end_of_second_attempt(cluster, job)
    assert (state["JobState"], state["Restarts"], state["TimeLimit"]) == ("COMPLETED", "1", "00:01:00"), state
    output = Path(state["StdOut"]).read_text()
    message = (
        "another step may not end in time before the end that SLURM has set for the job: stopping with a checkpoint"
    )
    assert output.count(message) == 1 and "continuing after step 1 from" in output
    assert numbers(tmp_path / "run") == torchrun_metrics


CANCELLED = """
trap 'echo stop requested; sleep 1; echo saved; exit 85' TERM
echo started
for _ in $(seq 600); do sleep 0.1; done
exit 3
"""


def test_cancelled_job_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """The ranks have time to write a checkpoint. The exit code for a requeue has no effect."""
    python = fake_python(tmp_path, CANCELLED)
    job = submit(cluster, tmp_path, "some.yaml", MEGAPPO_PYTHON=python, MEGAPPO_DOCTOR="no")
    logs = tmp_path / "logs" / str(job) / "attempt-0" / "train"
    for rank in (0, 1):
        await_text(logs / f"rank-{rank}.log", "started")
    cluster.run("scancel", str(job))
    for rank in (0, 1):
        await_text(logs / f"rank-{rank}.log", "saved")
    state = cluster.wait(job, "CANCELLED", seconds=60)
    assert state["Restarts"] == "0"
    time.sleep(3)
    assert cluster.state(job)["JobState"] == "CANCELLED"


def test_preemption_by_an_urgent_job(cluster: Cluster, tmp_path: Path) -> None:
    """Preemption by SLURM: the ranks get SIGTERM and time for a checkpoint. The job restarts when nodes are free."""
    script = CANCELLED.replace("echo started", 'if [ "${SLURM_RESTART_COUNT:-0}" = 1 ]; then exit 0; fi; echo started')
    python = fake_python(tmp_path, script)
    job = submit(cluster, tmp_path, "some.yaml", MEGAPPO_PYTHON=python, MEGAPPO_DOCTOR="no")
    logs = tmp_path / "logs" / str(job)
    for rank in (0, 1):
        await_text(logs / "attempt-0" / "train" / f"rank-{rank}.log", "started")
    urgent = ("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    other = int(cluster.run(*urgent, "--wrap=sleep 1", cwd=tmp_path).strip())
    cluster.wait(other, "COMPLETED", seconds=90)
    for rank in (0, 1):
        assert "saved" in (logs / "attempt-0" / "train" / f"rank-{rank}.log").read_text()
    state = end_of_second_attempt(cluster, job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), cluster.log(state)
    assert (logs / "attempt-1" / "train" / "exit-1").read_text() == "0\n"


def test_failed_rank_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    python = fake_python(tmp_path, 'if [ "$SLURM_PROCID" = 1 ]; then exit 7; fi; sleep 100')
    job = submit(cluster, tmp_path, "some.yaml", MEGAPPO_PYTHON=python, MEGAPPO_DOCTOR="no")
    start = time.monotonic()
    state = cluster.wait(job, "COMPLETED", "FAILED", "CANCELLED", seconds=60)
    assert state["JobState"] == "FAILED"
    assert time.monotonic() - start < 50
    assert (tmp_path / "logs" / str(job) / "attempt-0" / "train" / "exit-1").read_text() == "7\n"


def test_submission_from_another_folder_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    command = [
        "sbatch", "--parsable", "--nodes=1", f"--output={tmp_path}/job.out", str(ROOT / "launch/slurm/ppo.sbatch"),
    ]  # fmt: skip
    job = int(cluster.run(*command, "some.yaml", cwd=tmp_path, env=job_environment(cluster)).strip())
    state = cluster.wait(job, "FAILED", "COMPLETED", seconds=60)
    assert state["ExitCode"] == "2:0"
    assert "is not the repository; submit from there, or set MEGAPPO_ROOT" in cluster.log(state)


def test_job_of_another_folder_runs_in_this_folder(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "my dir"
    folder.mkdir()
    environment = job_environment(cluster, MEGAPPO_PYTHON=fake_python(tmp_path, "pwd"), MEGAPPO_ROOT=ROOT)
    command = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/job.out"]
    script = str(ROOT / "launch/slurm/ppo.sbatch")
    job = int(cluster.run(*command, script, "some.yaml", cwd=folder, env=environment | {"MEGAPPO_DOCTOR": "no"}))
    state = cluster.wait(job, "COMPLETED", "FAILED", seconds=60)
    assert state["JobState"] == "COMPLETED", cluster.log(state)
    assert (folder / "logs" / str(job) / "attempt-0/train/rank-1.log").read_text() == f"{folder}\n"


ARRAY_TASK = """#!/bin/bash
set -u
ROOT={root} MEGAPPO_MOST_REQUEUES=100 MEGAPPO_LAUNCHER=srun
source $ROOT/launch/slurm/job.sh
source $ROOT/launch/slurm/engines.sh
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || exit 0
srun --job-name train --ntasks 1 --overlap sleep 120 &
until squeue --noheader --steps --job "$SLURM_JOB_ID" --format %j | grep -q train; do sleep 0.2; done
touch {folder}/began-$SLURM_ARRAY_TASK_ID
if [ "$SLURM_JOB_ID" = "$SLURM_ARRAY_JOB_ID" ]; then # the last task
    until [ -e {folder}/began-0 ] && [ -e {folder}/began-1 ]; do sleep 0.2; done
    echo "this is $(job_name), which ends at $(end_of_job)"
    signal_step train KILL
    requeue
fi
wait
"""


def test_last_task_of_an_array_is_requeued_alone(cluster: Cluster, tmp_path: Path) -> None:
    """The job ID of the last task equals the ID of the array, which commands of SLURM apply to all tasks. A requeue or
    a signal must not affect the other tasks."""
    script = tmp_path / "task.sh"
    script.write_text(ARRAY_TASK.format(root=ROOT, folder=tmp_path))
    arguments = ("--array=0-2", "--ntasks=1", "--requeue", f"--chdir={tmp_path}", f"--output={tmp_path}/task-%a.out")
    job = int(cluster.run("sbatch", "--parsable", *arguments, str(script)).strip())
    await_text(tmp_path / "task-2.out", "back into the queue", 120)
    deadline = time.monotonic() + 60

    def states() -> dict[str, str]:
        rows = cluster.run("squeue", "--noheader", "--array", f"--job={job}", "--format=%K %T").split()
        return dict(zip(rows[::2], rows[1::2], strict=True))

    while states().get("2") == "RUNNING":
        assert time.monotonic() < deadline, states()
        time.sleep(0.2)
    assert states()["0"] == states()["1"] == "RUNNING"
    steps = cluster.run("squeue", "--noheader", "--steps", f"--job={job}", "--format=%i %j").split()
    assert {f"{job}_0.0", f"{job}_1.0"} <= set(steps)
    assert f"this is {job}_2, which ends at " in (tmp_path / "task-2.out").read_text()
