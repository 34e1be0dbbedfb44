"""Helpers for jobs on the test cluster: environment variables, metrics and restarts."""

from __future__ import annotations

import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from megappo.observe.metrics import read_metrics
from tests.slurm.cluster import Cluster

SHORT = (
    "run.steps=2", "rollout.prompts_per_step=10", "actor.minibatch_sequences=40", "critic.minibatch_sequences=40",
    "runtime.threads_per_rank=1", "evaluation=null", "data.validation=null", "run.export_final_model=false",
)  # fmt: skip
MEASURED = ("time/", "memory/", "sync/seconds", "sync/transfer_seconds", "sync/gigabytes")


def job_environment(cluster: Cluster, **settings: object) -> dict[str, str]:
    """Return the environment variables of a submission."""
    return cluster.environment | {"MEGAPPO_PYTHON": sys.executable} | {k: str(v) for k, v in settings.items()}


def numbers(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run that do not depend on time or memory."""
    lines = read_metrics(directory / "metrics.jsonl")
    return [
        {k: v for k, v in line.items() if not k.startswith(MEASURED) and "per_second" not in k and k != "mfu"}
        for line in lines
    ]


def await_text(path: Path, text: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, f"no '{text}' in {path}"
        time.sleep(0.2)


def hurry(cluster: Cluster, job: int) -> None:
    """Shorten the wait of a requeued job, which is two minutes in SLURM.

    A delay of a few seconds must remain. A node refuses a job that returns in the second of its requeue ("job
    credential revoked"), and SLURM then marks the job as failed.
    """
    state = cluster.state(job)
    if state["JobState"] == "PENDING" and state["Restarts"] != "0":
        begins = datetime.fromisoformat(state["EligibleTime"])
        if begins > datetime.now() + timedelta(seconds=10):
            cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+4seconds")


def end_of_second_attempt(cluster: Cluster, job: int) -> dict[str, str]:
    """Wait for the end of a job that is requeued, and return its fields."""
    deadline = time.monotonic() + 300
    while (state := cluster.state(job))["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED"):
        assert time.monotonic() < deadline, f"{state}: {cluster.log(state)}"
        hurry(cluster, job)
        time.sleep(0.5)
    return state
