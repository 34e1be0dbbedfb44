"""Real SLURM: training and SGLang as two steps of one job, on separate nodes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import pytest

from megappo.engines.sglang.servers.guard import session_pids, shared_files
from megappo.observe.metrics import read_metrics
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import await_text, hurry, job_environment
from tests.support.places import ROOT

pytestmark = [
    pytest.mark.waits,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment"),
]

SMALL = (
    "configs/sglang_disaggregated.yaml", "actor.layout={}", "critic.layout={}", "rollout.prompts_per_step=10",
    "actor.minibatch_sequences=40", "critic.minibatch_sequences=40", "runtime.threads_per_rank=1",
    "evaluation=null", "data.validation=null", "run.export_final_model=false", "rollout.ahead=0",
    "algorithm.old_logprob=decoupled", "actor.optimizer.schedule=constant",
)  # fmt: skip
ONE_NODE = ("--nodes=1", "--ntasks-per-node=1", "--exclusive")


def submit(cluster: Cluster, folder: Path, shape: tuple[str, ...], *arguments: str, **settings: object) -> int:
    """Submit the script for disaggregated jobs and return the job ID."""
    environment = job_environment(cluster, MEGAPPO_LOGS=folder / "logs", MEGAPPO_ENGINE_LINGER=8, **settings)
    command = ["sbatch", "--parsable", f"--output={folder}/job.out", *shape, "launch/slurm/ppo_disaggregated.sbatch"]
    return int(
        cluster.run(*command, *SMALL, *arguments, f"run.directory={folder}/run", cwd=ROOT, env=environment).strip()
    )


def await_steps(cluster: Cluster, job: int, folder: Path, count: int) -> None:
    """Wait until a run has finished `count` PPO steps."""
    metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 400
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        state = cluster.state(job)
        alive = state["JobState"] in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED")
        assert alive and time.monotonic() < deadline, cluster.log(state) + logs_of(folder)
        time.sleep(0.5)


def logs_of(folder: Path) -> str:
    """Return the ends of all logs."""
    return "\n".join(f"{p}: {p.read_text()[-1500:]}" for p in sorted((folder / "logs").rglob("*.log")))


def places(cluster: Cluster, job: int) -> dict[str, str]:
    """Return the nodes of the running job steps, by step name."""
    jobs = ",".join(map(str, range(job, job + 2)))
    lines = cluster.run("squeue", "--noheader", "--steps", f"--job={jobs}", "--format=%j %N").splitlines()
    return dict(line.split() for line in lines if line.split()[0] in ("train", "engines"))


def servers(cluster: Cluster) -> dict[int, set[str]]:
    """Return the scratch folders and the shared memory of SGLang servers of this cluster, by session."""
    sessions = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_text().split("\0")
                ours = f"SLURM_CONF={cluster.folder}/".encode() in (entry / "environ").read_bytes()
            except OSError:
                continue
            if (
                ours
                and "sglang.launch_server" in arguments
                and not any(argument.endswith("guard.py") for argument in arguments)
            ):
                session, scratch = os.getsid(int(entry.name)), Path(arguments[arguments.index("--config") + 1]).parent
                sessions[session] = {str(scratch), *shared_files(session_pids(session))}
    return sessions


def second_part(seen: dict[int, set[str]]) -> int:
    """Return the session of the second part of a server, which receives no requests."""
    nodes = {}
    for session, paths in seen.items():
        (arguments,) = (json.loads(file.read_text()) for path in paths if (file := Path(path, "server.yaml")).exists())
        nodes[arguments["node-rank"]] = session
    assert sorted(nodes) == [0, 1]
    return nodes[1]


def assert_nothing_remains(seen: dict[int, set[str]]) -> None:
    """Check that no processes, scratch folders and shared memory of these servers remain."""
    deadline = time.monotonic() + 30
    while any(session_pids(session) or any(map(os.path.exists, paths)) for session, paths in seen.items()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.2)


def test_trainers_and_engines_are_two_steps(cluster: Cluster, tmp_path: Path) -> None:
    """One server uses two nodes. The part on the second node is killed during the run. Both parts are then restarted
    and receive the weights, and the run continues to its end."""
    shape = ("--partition=all", "--nodes=3", "--ntasks-per-node=1")
    wide = ("run.steps=12", "rollout.servers.tensor_parallel=2", "rollout.servers.nodes=2")
    job = submit(cluster, tmp_path, shape, *wide, MEGAPPO_ENGINE_NODES=2)
    await_steps(cluster, job, tmp_path, 2)
    assert places(cluster, job) == {"train": "n1", "engines": "n[2-3]"}
    seen = servers(cluster)
    os.kill(second_part(seen), signal.SIGKILL)
    state = cluster.wait(job, "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", seconds=400)
    assert state["JobState"] == "COMPLETED", cluster.log(state) + logs_of(tmp_path)
    logs = tmp_path / "logs" / str(job) / "attempt-0"
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 13))
    log = (logs / "engines" / "engine-0.log").read_text()
    assert "died; part 1 of server 0, on" in log and log.count("is ready") == 2
    assert (logs / "engines" / "engine-0-part-1.log").read_text().count("is ready") == 2
    assert "1 ranks on 1 of the nodes, 1 engines on n2,n3" in (tmp_path / "job.out").read_text()
    assert (logs / "doctor" / "exit-0").read_text() == "0\n"
    assert_nothing_remains(seen)
    written = (tmp_path / "job.out", logs / "job.txt", logs / "train" / "rank-0.log")
    texts = log + "".join(path.read_text() for path in written)
    assert "SGLANG_API_KEY" not in texts


def await_requeued(cluster: Cluster, *components: int) -> None:
    """Wait until SLURM has requeued all components. A job that is cancelled earlier would return, because `scontrol
    requeue` also accepts ended jobs."""
    deadline = time.monotonic() + 60
    while any(cluster.state(component)["Restarts"] != "1" for component in components):
        assert time.monotonic() < deadline, [cluster.state(component) for component in components]
        time.sleep(0.2)


def await_second_attempt(cluster: Cluster, *components: int) -> None:
    """Wait until the second attempt of all components runs."""
    deadline = time.monotonic() + 200
    while not all(
        (state := cluster.state(c))["Restarts"] == "1" and state["JobState"] == "RUNNING" for c in components
    ):
        assert time.monotonic() < deadline
        for component in components:
            hurry(cluster, component)
        time.sleep(1)


@pytest.mark.parametrize("continues", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_heterogeneous_job_is_requeued_and_cancelled(cluster: Cluster, tmp_path: Path, continues: bool) -> None:
    """The signal before the time limit requeues the job, and a second attempt continues the run. After scancel, no
    processes or files of the servers remain."""
    settings = ("run.steps=100000", "checkpoint.every_steps=100000")
    job = submit(cluster, tmp_path, (*ONE_NODE, ":", *ONE_NODE), *settings, MEGAPPO_DOCTOR="no")
    await_steps(cluster, job, tmp_path, 2)
    assert places(cluster, job) == {"train": "n1", "engines": "n2"}
    seen = servers(cluster)
    cluster.run("scancel", "--signal=USR1", str(job), str(job + 1))
    await_text(tmp_path / "job.out", "back into the queue", 60)
    await_requeued(cluster, job, job + 1)
    assert_nothing_remains(seen)
    if continues:
        done = len(read_metrics(tmp_path / "run" / "metrics.jsonl"))
        await_second_attempt(cluster, job, job + 1)
        await_steps(cluster, job, tmp_path, done + 2)
        steps = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1))
        seen = servers(cluster)
        assert seen
    cluster.run("scancel", str(job))
    assert cluster.wait(job, "CANCELLED", seconds=60)["JobState"] == "CANCELLED"
    assert_nothing_remains(seen)
