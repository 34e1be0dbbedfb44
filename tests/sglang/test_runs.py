"""Complete runs with SGLang from the command line, and the end of runs."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megappo.engines.sglang.servers.guard import session_pids
from megappo.observe.metric_docs import documented
from megappo.observe.metrics import read_metrics
from tests.support.harness import start
from tests.support.places import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment"),
]
exhaustive = pytest.mark.exhaustive
ALONE = ("actor.layout={}", "critic.layout={}", "evaluation=null", "data.validation=null")
ONE = "rollout.servers.count=1"
SMALL = ("rollout.prompts_per_step=10", "actor.minibatch_sequences=40", "critic.minibatch_sequences=40")


@pytest.mark.parametrize(
    ("config", "steps", "reward"),
    [
        ("sglang_quickstart", 8, 0.08),
        ("sglang_disaggregated", 10, 0.06),
        pytest.param("sglang_disaggregated", 20, 0.3, marks=exhaustive),
        pytest.param("sglang_quickstart", 45, 0.8, marks=exhaustive),
    ],
)
def test_run_learns(tmp_path: Path, config: str, steps: int, reward: float) -> None:
    """The reward reaches the level of the embedded engine in fewer steps than the configurations set. Without learning,
    the mean reward of the last five steps (2,000 samples) has a mean of 0.02 and a standard deviation of 0.003."""
    changes = (f"run.steps={steps}", "actor.optimizer.schedule=constant", "evaluation.every_steps=20")
    command = ("train", f"configs/{config}.yaml", f"run.directory={tmp_path / 'run'}", *changes)
    done = start("megappo", *command, processes=2, timeout_seconds=560)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = {name for line in lines for name in line} - {"step"}
    assert not [name for name in names if documented(name) is None]
    ahead = config == "sglang_disaggregated"
    for line in lines[1:]:
        assert line["engine/restarts"] == 0 if "engine/restarts" in line else ahead
        assert {"mismatch/mean", "mismatch/max", "mismatch/k3", "mismatch/truncated"} <= line.keys()
        assert line["rollout/lag"] == (1 if ahead and line["step"] > 1 else 0)
        if line["rollout/lag"] == 0:
            assert line["mismatch/max"] < 1e-5
        else:  # the trained weights are one update ahead of the sampling weights
            assert 1e-4 < line["mismatch/mean"] < 0.5
        assert line.get("sync/probe_gap", 0) < 1e-5
    assert sum(line["reward/mean"] for line in lines[-5:]) / 5 > reward
    assert (tmp_path / "run" / "engines" / "engine-0.log").exists()
    assert len(list((tmp_path / "run" / "engines").glob("*.log"))) == (2 if ahead else 1)


def test_prompts_in_flight_through_servers(tmp_path: Path) -> None:
    """Prompts of three steps are in flight. Responses of the first step have the trained weights, and later responses
    have weights that are up to three versions older."""
    settings = ("rollout.ahead=3", "rollout.max_lag=3", "run.steps=5", "evaluation.every_steps=2", *SMALL, ONE)
    command = ("train", "configs/sglang_disaggregated.yaml", f"run.directory={tmp_path / 'run'}")
    done = start("megappo", *command, *settings, processes=2, timeout_seconds=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(6))
    assert lines[1]["rollout/lag"] == 0 and lines[1]["mismatch/max"] < 1e-5
    for line in lines[1:]:
        assert line["rollout/lag"] <= line["rollout/lag_max"] <= 3 and line["rollout/dropped"] == 0
        assert line["sync/probe_gap"] < 1e-5 and line["engine/restarts"] == 0
        assert line["sync/version"] == line["step"] + 1
    assert any(line["rollout/lag"] > 0 for line in lines[1:])
    assert [line["rollout/in_flight"] + line["rollout/waiting"] for line in lines[1:]] == [30, 30, 20, 10, 0]


def test_episodes_through_servers(tmp_path: Path) -> None:
    """Episodes have two turns and a tool. The log-probabilities of both turns match the trainer, also after trained
    adapters are synced to the servers."""
    command = (
        "train", "configs/examples/10_tools/tools.yaml", f"run.directory={tmp_path / 'run'}", "run.steps=2",
        "evaluation=null",
        "data.validation=null", "rollout.servers.kind=sglang", "rollout.environment.arguments={}",
        "rollout.servers={max_total_tokens: 16384, threads: 1, deterministic: false}",  # for a prefix cache
        "actor.lora={rank: 8, alpha: 16}",
    )  # fmt: skip
    done = start("megappo", *command, processes=2, timeout_seconds=560)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert line["episode/turns"] == 2 and line["episode/failures"] == 0 and line["tool/lookup/calls"] == 1
        assert 0.3 < line["rollout/cache_hit_rate_min"] <= line["rollout/cache_hit_rate"] < 1
        assert line["rollout/cache_hit_rate"] <= line["rollout/cache_hit_rate_max"] < 1
        assert 0 < line["mismatch/max"] < 1e-5 and line["rollout/lag"] == 0


@pytest.mark.parametrize("ahead", [1, 2])
@exhaustive
def test_episodes_ahead_through_servers(tmp_path: Path, ahead: int) -> None:
    """With `ahead=1`, episodes of the next step run during a training step with the initial weights of the step. With
    `ahead=2`, episodes are in flight over two syncs."""
    command = (
        "train", "configs/examples/10_tools/tools.yaml", f"run.directory={tmp_path / 'run'}", "run.steps=3",
        "evaluation=null",
        "data.validation=null", "rollout.servers.kind=sglang", "rollout.environment.arguments={}",
        f"rollout.ahead={ahead}", *(["rollout.max_lag=2"] if ahead > 1 else []),
        "rollout.servers={max_total_tokens: 16384, threads: 1}", "algorithm.old_logprob=corrected", *SMALL, *ALONE,
    )  # fmt: skip
    done = start("megappo", *command, processes=1, timeout_seconds=560)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")[-3:]
    assert lines[0]["rollout/lag"] == 0 < lines[1]["rollout/lag"] and lines[2]["rollout/lag"] > 0
    for line in lines:
        assert line["rollout/lag"] == 1 if ahead == 1 and line["step"] > 1 else line["rollout/lag"] <= 2
        assert line["episode/turns"] == 2 and line["episode/failures"] == 0 and line["tool/lookup/calls"] == 1
        assert (line["mismatch/max"] < 1e-5) == (line["rollout/lag"] == 0)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Yield a run in the third step or later, in a separate process group, and the sessions of its servers."""
    command = [sys.executable, "-m", "megappo", "train", "configs/sglang_quickstart.yaml", *SMALL, *ALONE]
    run = subprocess.Popen(
        [*command, "run.steps=100000", f"run.directory={tmp_path / 'run'}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=10)[0][-3000:]
        time.sleep(0.2)
    keepers = [keeper for guard in children(run.pid, "guard.py") for keeper in children(guard, "guard.py")]
    sessions = [pid for keeper in keepers for pid in children(keeper, "launch_server")]
    yield run, sessions
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)


def children(parent: int, word: str) -> list[int]:
    """Return the child processes with `word` in the command line."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent and word.encode() in (entry / "cmdline").read_bytes():
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=exhaustive), signal.SIGKILL], ids=["ctrl-c", "killed"]
)
def test_servers_end_with_the_run(running: tuple[subprocess.Popen[str], list[int]], number: int) -> None:
    run, sessions = running
    assert sessions and all(session_pids(s) for s in sessions)
    os.killpg(run.pid, number)
    run.wait(60)
    deadline = time.monotonic() + 30
    while any(session_pids(s) for s in sessions):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def failed_output(directory: Path, sglang: str, timeout: float) -> str:
    """Return the output of a run of one process that cannot start its servers."""
    command = ("train", "configs/sglang_quickstart.yaml", f"run.directory={directory}", *ALONE)
    done = start("megappo", *command, f"rollout.servers={sglang}", timeout_seconds=timeout)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output[-4000:]
    assert 'Traceback (most recent call last):\n  File "/' not in output.split("megappo: error")[0]
    return output


def test_unreachable_external_servers_fail_at_the_deadline(tmp_path: Path) -> None:
    """The error names the server."""
    sglang = "{placement: disaggregated, urls: ['http://127.0.0.1:9'], start_timeout_seconds: 2}"
    output = failed_output(tmp_path / "run", sglang, 120)
    assert "server 0 (http://127.0.0.1:9) of rollout.servers.urls returned no healthy response" in output
    assert "Traceback" not in output


def test_failed_server_start_reports_the_sglang_error(tmp_path: Path) -> None:
    """The error of the run includes the error of SGLang."""
    output = failed_output(tmp_path / "run", "{arguments: {no-such-argument: 1}, max_restarts: 0}", 200)
    assert "the servers cannot be started: server 0" in output
    assert "no-such-argument" in output
