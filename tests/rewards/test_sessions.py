"""What a reward function starts ends with its worker, also where it has made a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megappo.config.schema import RewardSettings
from megappo.rewards.workers import RewardPool, RewardRequest

pytestmark = pytest.mark.waits

USER_MODULE = '''
import os, subprocess, time

SLEEP = ["sleep", "1000"]

def leave(*, prompt, response, answer, metadata):
    """Starts processes outside of its own session, tells their ids, and does what the response says."""
    daemon = subprocess.check_output(["sh", "-c", "setsid sleep 1000 >/dev/null & echo $!"])
    own = subprocess.Popen(SLEEP, start_new_session=True)
    forked = os.fork()
    if forked == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        with open(answer, "a") as told: print(os.getpid(), file=told)
        time.sleep(1000)
    os.waitpid(forked, 0)
    with open(answer, "a") as told: print(own.pid, int(daemon), file=told)
    match response:
        case "hang": time.sleep(1000)
        case "exit": os._exit(3)
        case "group": os.killpg(0, 9)
    return 1.0
'''
STARTED = 3


@pytest.fixture(autouse=True)
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the function writes the ids of what it has started; what is left of them afterwards is ended."""
    (tmp_path / "leaves.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "leaves", raising=False)
    yield tmp_path / "told"
    for pid in alive(tmp_path / "told"):
        os.kill(pid, signal.SIGKILL)


def alive(told: Path) -> list[int]:
    found = []
    for pid in map(int, told.read_text().split() if told.exists() else ()):
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            pass
    return found


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def settings(timeout_seconds: float) -> RewardSettings:
    return RewardSettings(function="leaves:leave", timeout_seconds=timeout_seconds, max_failure_fraction=1.0)


def request(response: str, told: Path) -> RewardRequest:
    return RewardRequest("p", response, response, str(told), {})


@pytest.mark.parametrize(
    ("response", "reason"),
    [("hang", "ran out of time"), ("exit", "ended its worker process"), ("group", "ended its worker process")],
)
def test_nothing_is_left_of_a_worker_that_is_replaced(response: str, reason: str, told: Path) -> None:
    with RewardPool(settings(timeout_seconds=3.0)) as pool:
        assert pool.score([request(response, told)]).failures == [(0, reason)]
        assert len(told.read_text().split()) >= STARTED - 1  # the last may not have come to tell
        assert alive(told) == []


def test_what_a_function_starts_lives_as_long_as_its_worker(told: Path) -> None:
    """It may be meant for the samples to come, such as a sandbox; nobody signals it, and its ended parts are reaped."""
    with RewardPool(settings(timeout_seconds=60.0)) as pool:
        pool.score([request("fine", told), request("fine", told)])
        assert wait_until(lambda: len(alive(told)) == 2 * STARTED)
        [worker] = pool.workers
        below = psutil.Process(worker.supervisor.pid).children(recursive=True)
        assert [p for p in below if p.status() == psutil.STATUS_ZOMBIE and p.ppid() == worker.supervisor.pid] == []
        os.kill(worker.supervisor.pid, signal.SIGSTOP)  # as a debugger does; closing does not wait for it
    assert alive(told) == []


def test_nothing_is_left_where_the_supervisor_was_killed(told: Path) -> None:
    with RewardPool(settings(timeout_seconds=60.0)) as pool:
        pool.score([request("fine", told)])
        assert wait_until(lambda: len(alive(told)) == STARTED)
        os.kill(pool.workers[0].supervisor.pid, signal.SIGKILL)
        assert wait_until(lambda: pool.workers[0].speaks)
        first = set(alive(told))
        assert pool.score([request("fine", told)]).failures == []
        assert not first & set(alive(told))
    assert alive(told) == []


TRAINER = """
import os, sys, time
from megappo.config.schema import RewardSettings
from megappo.rewards.workers import RewardPool, RewardRequest
pool = RewardPool(RewardSettings(function="leaves:leave", timeout_seconds=1000.0))
if os.fork() == 0:  # as a checkpoint's writer does: it holds what the trainer holds
    time.sleep(1000)
pool.score([RewardRequest("p", "hang", "hang", sys.argv[1], {})])
"""


def test_nothing_is_left_of_a_trainer_that_was_killed(told: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(told)], env=environment)
    assert wait_until(lambda: told.exists() and len(told.read_text().split()) == STARTED, seconds=60)
    below = psutil.Process(trainer.pid).children(recursive=True)
    [fork] = [p for p in below if "rewards.worker_main" not in " ".join(p.cmdline()) and p.ppid() == trainer.pid]
    trainer.kill()
    trainer.wait()
    try:
        assert wait_until(lambda: alive(told) == [])
        _, left = psutil.wait_procs([p for p in below if p != fork], timeout=20)
        assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        fork.kill()
