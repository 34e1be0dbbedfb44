"""Processes that a reward function starts end with its worker, also in separate sessions."""

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
from megappo.rewards.processes.workers import RewardPool, RewardRequest

pytestmark = pytest.mark.waits

USER_MODULE = '''
import os, subprocess, time

SLEEP = ["sleep", "1000"]

def leave(*, prompt, response, answer, metadata):
    """Start processes in other sessions, write their ids, and perform the action of the response."""
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
def pid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file for the ids of the started processes. Remaining processes are ended after the test."""
    (tmp_path / "leaves.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "leaves", raising=False)
    yield tmp_path / "told"
    for pid in alive(tmp_path / "told"):
        os.kill(pid, signal.SIGKILL)


def alive(pid_file: Path) -> list[int]:
    pids = []
    for pid in map(int, pid_file.read_text().split() if pid_file.exists() else ()):
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                pids.append(pid)
        except psutil.NoSuchProcess:
            pass
    return pids


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def settings(timeout_seconds: float) -> RewardSettings:
    return RewardSettings(function="leaves:leave", timeout_seconds=timeout_seconds, max_failure_fraction=1.0)


def request(response: str, pid_file: Path) -> RewardRequest:
    return RewardRequest("p", response, response, str(pid_file), {})


@pytest.mark.parametrize(
    ("response", "reason"),
    [("hang", "ran out of time"), ("exit", "ended its worker process"), ("group", "ended its worker process")],
)
def test_replaced_workers_leave_no_processes(response: str, reason: str, pid_file: Path) -> None:
    with RewardPool(settings(timeout_seconds=3.0)) as pool:
        assert pool.score([request(response, pid_file)]).failures == [(0, reason)]
        assert len(pid_file.read_text().split()) >= STARTED - 1  # the last process may not have written its id
        assert alive(pid_file) == []


def test_started_processes_live_as_long_as_the_worker(pid_file: Path) -> None:
    """Such a process may serve later samples, as a sandbox does. No process is signalled, and ended processes are
    reaped."""
    with RewardPool(settings(timeout_seconds=60.0)) as pool:
        pool.score([request("fine", pid_file), request("fine", pid_file)])
        assert wait_until(lambda: len(alive(pid_file)) == 2 * STARTED)
        [worker] = pool.workers
        below = psutil.Process(worker.supervisor.pid).children(recursive=True)
        assert [p for p in below if p.status() == psutil.STATUS_ZOMBIE and p.ppid() == worker.supervisor.pid] == []
        os.kill(worker.supervisor.pid, signal.SIGSTOP)  # as a debugger does, without effect on closing
    assert alive(pid_file) == []


def test_killed_supervisor_leaves_no_processes(pid_file: Path) -> None:
    with RewardPool(settings(timeout_seconds=60.0)) as pool:
        pool.score([request("fine", pid_file)])
        assert wait_until(lambda: len(alive(pid_file)) == STARTED)
        os.kill(pool.workers[0].supervisor.pid, signal.SIGKILL)
        assert wait_until(lambda: pool.workers[0].speaks)
        first = set(alive(pid_file))
        assert pool.score([request("fine", pid_file)]).failures == []
        assert not first & set(alive(pid_file))
    assert alive(pid_file) == []


TRAINER = """
import os, sys, time
from megappo.config.schema import RewardSettings
from megappo.rewards.processes.workers import RewardPool, RewardRequest
pool = RewardPool(RewardSettings(function="leaves:leave", timeout_seconds=1000.0))
if os.fork() == 0:  # as for a checkpoint: the fork shares the open files
    time.sleep(1000)
pool.score([RewardRequest("p", "hang", "hang", sys.argv[1], {})])
"""


def test_killed_trainer_leaves_no_processes(pid_file: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(pid_file)], env=environment)
    assert wait_until(lambda: pid_file.exists() and len(pid_file.read_text().split()) == STARTED, seconds=60)
    below = psutil.Process(trainer.pid).children(recursive=True)
    [fork] = [
        p for p in below if "rewards.processes.worker_main" not in " ".join(p.cmdline()) and p.ppid() == trainer.pid
    ]
    trainer.kill()
    trainer.wait()
    try:
        assert wait_until(lambda: alive(pid_file) == [])
        _, left = psutil.wait_procs([p for p in below if p != fork], timeout=20)
        assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        fork.kill()
