"""Real SLURM: after a crash of a rank, a job with a new checkpoint is requeued and excludes the node."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megappo.observe.metrics import read_metrics
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SHORT, await_text, end_of_second_attempt
from tests.slurm.test_slurm import fake_python, submit

pytestmark = [pytest.mark.slow, pytest.mark.waits]

ONE_NODE = ("--nodes=1", "--partition=all")
CRASHING = """
attempt=${{SLURM_RESTART_COUNT:-0}}
if [ "$attempt" -ge {crashes} ]; then exit 0; fi
if [ "$SLURM_PROCID" = 1 ]; then sleep 2; exit 1; fi
[ -z "{checkpoint}" ] || echo $(({checkpoint} + attempt)) >"$MEGAPPO_RANK_LOGS/checkpoint"
sleep 0.5
{end}
"""
KILLED = "kill -KILL $$"


def crashing(
    cluster: Cluster, folder: Path, *, end: str = KILLED, checkpoint: str = "", flags: tuple[str, ...] = (),
    crashes: int = 1, **settings: str,
) -> int:  # fmt: skip
    """Submit a job whose rank 0 writes a checkpoint of this step and then runs `end`, in the first attempts."""
    python = fake_python(folder, CRASHING.format(crashes=crashes, checkpoint=checkpoint, end=end))
    return submit(cluster, folder, "some.yaml", flags=flags, MEGAPPO_PYTHON=python, MEGAPPO_DOCTOR="no", **settings)


def output_of_job(cluster: Cluster, job: int, *expected: str) -> str:
    """Wait for the end of a job, check its state and number of restarts, and return its output."""
    state = end_of_second_attempt(cluster, job)
    output = Path(state["StdOut"]).read_text()
    assert (state["JobState"], state["Restarts"]) == expected, output
    return output


def test_crash_after_a_checkpoint_requeues_on_another_node(cluster: Cluster, tmp_path: Path) -> None:
    job = crashing(cluster, tmp_path, checkpoint="12", flags=ONE_NODE)
    output = output_of_job(cluster, job, "COMPLETED", "1")
    log = (tmp_path / "logs" / str(job) / "attempt-0" / "train" / "rank-0.log").read_text()
    for text in (output, log):
        assert (
            "megappo: rank 0 was ended first, by SIGKILL, on node n1; the run has advanced to the checkpoint of step "
            "12, so the job goes back into the queue (requeue 1 of at most 3 after crashes, MEGAPPO_CRASH_REQUEUES)"
        ) in text
        assert "megappo: node n1 is excluded from now on (MEGAPPO_EXCLUDE_NODES)" in text
    assert "1 ranks on n1" in output and "1 ranks on n2" in output
    assert cluster.state(job)["ExcNodeList"] == "n1"


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "on node n1; the job ends, because the run has written no checkpoint since its last start"),
     ({"checkpoint": "12", "MEGAPPO_CRASH_REQUEUES": 0}, "the job ends, because MEGAPPO_CRASH_REQUEUES is 0"),
     ({"checkpoint": "12", "end": "exit 1"}, ""), ({"checkpoint": "12", "end": "exit 2"}, ""),
     ({"checkpoint": "12", "end": "kill -TERM $$"}, "")],
    ids=["no progress", "turned off", "error of code", "error of settings", "ended from outside"],
)  # fmt: skip
def test_other_errors_do_not_requeue_the_job(
    cluster: Cluster, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    job = crashing(cluster, tmp_path, flags=ONE_NODE, **options)  # type: ignore[arg-type]
    output = output_of_job(cluster, job, "FAILED", "0")
    assert message in output and "back into the queue" not in output


def test_job_reports_the_rank_with_the_fault(cluster: Cluster, tmp_path: Path) -> None:
    """All ranks end with the exit code of this rank. The job needs both nodes, so no node is excluded."""
    end = 'echo 1 >"$MEGAPPO_RANK_LOGS/first-failed"; exit 71'
    job = crashing(cluster, tmp_path, end=end, checkpoint="3")
    output = output_of_job(cluster, job, "COMPLETED", "1")
    assert "megappo: a device or NCCL failed on rank 1 on node n2; the run has advanced to the checkpoint of" in output
    assert "node n2 is not excluded, because the job needs 2 nodes and cannot use " in output


def test_the_number_of_requeues_is_limited(cluster: Cluster, tmp_path: Path) -> None:
    options = {"MEGAPPO_CRASH_REQUEUES": "1", "MEGAPPO_EXCLUDE_NODES": "no"}
    job = crashing(cluster, tmp_path, checkpoint="5", crashes=9, flags=ONE_NODE, **options)
    output = output_of_job(cluster, job, "FAILED", "1")
    assert "node n1 is not excluded, because MEGAPPO_EXCLUDE_NODES is no" in output
    assert "the job ends, because MEGAPPO_CRASH_REQUEUES allows 1 requeues" in output


def rank_of(directory: Path, rank: int) -> int:
    """Return the process ID of a rank of a run."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            arguments = process.cmdline()
            is_of_run = f"run.directory={directory}" in arguments and "python" in arguments[0]
            if is_of_run and process.environ().get("SLURM_PROCID") == str(rank):
                return process.pid
    raise AssertionError(f"no rank {rank}")


def test_training_resumes_from_the_checkpoint_after_a_kill(cluster: Cluster, tmp_path: Path) -> None:
    """Real training: a rank is killed after a checkpoint. The job resumes from the checkpoint and finishes."""
    run = tmp_path / "run"
    settings = (*SHORT, "run.steps=12", "checkpoint.every_steps=1", "checkpoint.asynchronous=false")
    job = submit(cluster, tmp_path, "configs/quickstart.yaml", f"run.directory={run}", *settings, MEGAPPO_DOCTOR="no")
    await_text(run / "metrics.jsonl", '"step": 3,', 240)
    os.kill(rank_of(run, 1), signal.SIGKILL)
    killed = time.monotonic()
    await_text(tmp_path / "job.out", "back into the queue", 120)
    assert time.monotonic() - killed < 60
    output = output_of_job(cluster, job, "COMPLETED", "1")
    assert "megappo: rank 1 was ended first, by SIGKILL, on node n2; the run has advanced" in output
    assert "continuing after step" in output
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == list(range(1, 13))
