"""Tests of the guard: all processes of a server end when the owner or the guard is killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megappo.config.sections.engine import ServerSettings

if importlib.util.find_spec("aiohttp") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

from megappo.engines.sglang.client import Endpoint
from megappo.engines.sglang.servers import guard as guard_module
from megappo.engines.sglang.servers.guard import ServerProcesses, session_pids
from megappo.engines.sglang.servers.server import Server

pytestmark = pytest.mark.waits

NAPS = [f"1000.{os.getpid()}{n}" for n in range(5)]
"""Durations that identify the processes of this test."""


def guarded(tmp_path: Path, command: str, cores: str = "") -> tuple[subprocess.Popen[bytes], int]:
    """Start a shell command under a guard. Return the guard and the session of the command."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    line = [
        sys.executable,
        "-I",
        "-S",
        str(guard_module.__file__),
        str(scratch),
        str(tmp_path / "log"),
        cores,
        "--",
        "bash",
        "-c",
        command,
    ]
    guard = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert guard.stdout is not None
    return guard, int(guard.stdout.readline())


def test_guard_ends_all_processes_when_its_owner_exits(tmp_path: Path) -> None:
    """The processes ignore SIGTERM, are stopped, or are no longer children."""
    guard, session = guarded(
        tmp_path, "trap '' TERM; (sleep 1000 &) ; sleep 1001 & kill -STOP $!; sleep 1002; sleep 1003"
    )
    deadline = time.monotonic() + 10
    while len(session_pids(session)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(session_pids(session)) == 4
    os.kill(guard.pid, signal.SIGINT)  # the guard ignores Ctrl-C
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(15) == 0
    assert session_pids(session) == []
    assert not (tmp_path / "scratch").exists()


def test_guard_exits_with_its_command(tmp_path: Path) -> None:
    name = f"/dev/shm/sgl_shm_test_{os.getpid()}"
    guard, session = guarded(tmp_path, f"echo started; exec 7<>{name}; sleep 6; exit 3")
    try:
        assert guard.wait(30) == 0
        assert session_pids(session) == []
        assert (tmp_path / "log").read_text() == "started\n"
        assert not Path(name).exists()  # the guard saw the open file during the command
    finally:
        Path(name).unlink(missing_ok=True)


def test_server_can_use_more_cores_than_owner(tmp_path: Path) -> None:
    """A server can use all cores of the job, even if a launcher bound the starting rank to a few cores."""
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < 2:
        pytest.skip("this machine has only one core for the tests")
    os.sched_setaffinity(0, ours[:1])
    try:
        guard, session = guarded(tmp_path, "sleep 1000", ",".join(map(str, ours)))
        assert os.sched_getaffinity(session) == set(ours)
        assert os.sched_getaffinity(guard.pid) == {ours[0]}
    finally:
        os.sched_setaffinity(0, ours)
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(15) == 0


def test_slow_server_start_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A message appears every 30 seconds, with the last line of the server's log."""
    guard, session = guarded(tmp_path, "sleep 1000")
    (tmp_path / "log").write_text("import\nloading weights: 12 of 48 files\n\n")
    now = time.monotonic()
    settings, scratch = ServerSettings(start_timeout_seconds=900), tmp_path / "scratch"
    made = Server(
        Endpoint(3, "http://127.0.0.1:9", "", 0), guard, session, scratch, tmp_path / "log", now + 900, settings
    )
    assert not made.is_ready() and capsys.readouterr().err == "", "no message may appear in the first 30 seconds"
    made.started_at = now - 65
    assert not made.is_ready() and not made.is_ready()
    assert capsys.readouterr().err == (
        f"megappo: {made.endpoint.name} has been starting for 1 min 5 s "
        "(rollout.servers.start_timeout_seconds is 900); its log ends with: loading weights: 12 of 48 files\n"
    )
    made.started_at = now - 91
    assert not made.is_ready() and "1 min 31 s" in capsys.readouterr().err
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(15) == 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Yield a server with hidden processes: in other sessions, without the server's variables, without a parent, and
    with shared memory."""
    shared = f"/dev/shm/sgl_shm_guard_{os.getpid()}"
    guard, session = guarded(
        tmp_path,
        f"exec 7<>{shared}; setsid sleep {NAPS[0]} & env -i setsid sleep {NAPS[1]} & (env -i setsid sleep {NAPS[2]} &);"
        f" (sleep {NAPS[3]} &); sleep {NAPS[4]}; sleep 1",
    )
    made = Server(
        Endpoint(0, "http://127.0.0.1:9", "", 0), guard, session, tmp_path / "scratch", tmp_path / "log", 0.0,
        ServerSettings(),
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while len(sleeping()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield made
    for pid in sleeping():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    Path(shared).unlink(missing_ok=True)


def sleeping() -> list[int]:
    """Return the processes of the server's command, except `bash`."""
    commands = {f"sleep\0{nap}\0".encode() for nap in NAPS}
    matches = []
    for pid in psutil.pids():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes() in commands:
                matches.append(pid)
    return matches


def keeper(guard: subprocess.Popen[bytes]) -> int:
    (child,) = psutil.Process(guard.pid).children()
    return child.pid


@pytest.mark.parametrize("killed", ["witness", "keeper", "session"])
def test_killed_guard_ends_its_server(server: Server, tmp_path: Path, killed: str) -> None:
    """The processes receive no request to stop, and no replacement is started."""
    pids = sleeping()
    if killed == "session":  # the session of the trainer's guard process
        os.killpg(os.getsid(server.guard.pid), signal.SIGKILL)
    else:
        os.kill(server.guard.pid if killed == "witness" else keeper(server.guard), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while sleeping() or server.scratch.exists():
        assert time.monotonic() < deadline, (pids, sleeping())
        time.sleep(0.05)
    assert session_pids(server.session) == []
    assert not Path(f"/dev/shm/sgl_shm_guard_{os.getpid()}").exists()
    assert server.guard.wait(10) == (0 if killed == "keeper" else -signal.SIGKILL)


def test_both_guard_processes_killed_end_the_server(server: Server) -> None:
    other = keeper(server.guard)
    os.kill(server.guard.pid, signal.SIGSTOP)
    os.kill(other, signal.SIGSTOP)
    os.kill(server.guard.pid, signal.SIGKILL)
    os.kill(other, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(server.session):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("killed", ["nobody", "witness", "both"])
def test_stopped_server_leaves_no_processes(server: Server, monkeypatch: pytest.MonkeyPatch, killed: str) -> None:
    """`stop` ends all processes itself, before the kernel or the keeper would. A replacement then has free memory."""
    monkeypatch.setattr("megappo.engines.sglang.servers.server.STOP_SECONDS", 5.0)
    if killed == "both":
        os.kill(other := keeper(server.guard), signal.SIGSTOP)
        os.kill(server.guard.pid, signal.SIGKILL)
        os.kill(other, signal.SIGKILL)
    elif killed == "witness":
        os.kill(server.guard.pid, signal.SIGKILL)
    server.stop()
    # Hidden processes are known only to the processes that inherit orphans. In one of the cases, both of these are
    # dead.
    assert len(sleeping()) <= (2 if killed == "both" else 0)
    assert session_pids(server.session) == [] and not server.scratch.exists()
    assert ServerProcesses(server.session, str(server.scratch)).alive() == []
    assert not server.running


def test_unkillable_process_does_not_block_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for a driver or a file server handles no signals."""
    monkeypatch.setattr(guard_module, "KILL_SECONDS", 0.2)
    # An unused process id, so no process receives a signal.
    monkeypatch.setattr(ServerProcesses, "alive", lambda _: [2**22 + 1])
    processes = object.__new__(ServerProcesses)
    start = time.monotonic()
    processes.end()
    assert 0.2 <= time.monotonic() - start < 10
