"""Nothing of a server outlives its owner or its guard, whoever of them is killed."""

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

from megappo.config.engine import SGLangSettings

if importlib.util.find_spec("aiohttp") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

from megappo.engines.sglang import guard as guard_module
from megappo.engines.sglang.client import Endpoint
from megappo.engines.sglang.guard import ServerProcesses, session_pids
from megappo.engines.sglang.server import Server

pytestmark = pytest.mark.waits

NAPS = [f"1000.{os.getpid()}{n}" for n in range(5)]
"""Seconds by which the processes of this test are known."""


def guarded(tmp_path: Path, command: str, cores: str = "") -> tuple[subprocess.Popen[bytes], int]:
    """A shell command under a guard; returns the guard and the command's session."""
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


def test_a_guard_ends_everything_when_its_owner_goes(tmp_path: Path) -> None:
    """Also what ignores SIGTERM, what is stopped, and what is not a child any more."""
    guard, session = guarded(
        tmp_path, "trap '' TERM; (sleep 1000 &) ; sleep 1001 & kill -STOP $!; sleep 1002; sleep 1003"
    )
    deadline = time.monotonic() + 10
    while len(session_pids(session)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(session_pids(session)) == 4
    os.kill(guard.pid, signal.SIGINT)  # Ctrl-C is the owner's business
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(15) == 0
    assert session_pids(session) == []
    assert not (tmp_path / "scratch").exists()


def test_a_guard_follows_its_command(tmp_path: Path) -> None:
    name = f"/dev/shm/sgl_shm_test_{os.getpid()}"
    guard, session = guarded(tmp_path, f"echo started; exec 7<>{name}; sleep 6; exit 3")
    try:
        assert guard.wait(30) == 0
        assert session_pids(session) == []
        assert (tmp_path / "log").read_text() == "started\n"
        assert not Path(name).exists()  # seen open while the command lived
    finally:
        Path(name).unlink(missing_ok=True)


def test_a_server_may_have_other_cores_than_its_owner(tmp_path: Path) -> None:
    """Those of the whole job: a launcher may have bound the rank that starts the server to a few of them."""
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < 2:
        pytest.skip("this machine gives the tests one core")
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


def test_a_server_that_starts_slowly_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each 30 seconds, with the last line of its log."""
    guard, session = guarded(tmp_path, "sleep 1000")
    (tmp_path / "log").write_text("import\nloading weights: 12 of 48 files\n\n")
    now = time.monotonic()
    settings, scratch = SGLangSettings(start_timeout_seconds=900), tmp_path / "scratch"
    made = Server(
        Endpoint(3, "http://127.0.0.1:9", "", 0), guard, session, scratch, tmp_path / "log", now + 900, settings
    )
    assert not made.is_ready() and capsys.readouterr().err == "", "the first half minute is silent"
    made.started_at = now - 65
    assert not made.is_ready() and not made.is_ready()
    assert capsys.readouterr().err == (
        f"megappo: {made.endpoint.name} has been starting for 1 min 5 s (rollout.sglang.start_timeout_seconds is 900); "
        "its log ends with: loading weights: 12 of 48 files\n"
    )
    made.started_at = now - 91
    assert not made.is_ready() and "1 min 31 s" in capsys.readouterr().err
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(15) == 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that hides processes: in sessions of their own, without its variables, without a parent, and holding memory
    that is shared."""
    shared = f"/dev/shm/sgl_shm_guard_{os.getpid()}"
    guard, session = guarded(
        tmp_path,
        f"exec 7<>{shared}; setsid sleep {NAPS[0]} & env -i setsid sleep {NAPS[1]} & (env -i setsid sleep {NAPS[2]} &);"
        f" (sleep {NAPS[3]} &); sleep {NAPS[4]}; sleep 1",
    )
    made = Server(
        Endpoint(0, "http://127.0.0.1:9", "", 0), guard, session, tmp_path / "scratch", tmp_path / "log", 0.0,
        SGLangSettings(),
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
    """The processes of the server's command, `bash` aside."""
    words = {f"sleep\0{nap}\0".encode() for nap in NAPS}
    found = []
    for pid in psutil.pids():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes() in words:
                found.append(pid)
    return found


def keeper(guard: subprocess.Popen[bytes]) -> int:
    (found,) = psutil.Process(guard.pid).children()
    return found.pid


@pytest.mark.parametrize("killed", ["witness", "keeper", "session"])
def test_a_server_dies_with_its_guard(server: Server, tmp_path: Path, killed: str) -> None:
    """Nobody tells them to stop, and no replacement is started."""
    pids = sleeping()
    if killed == "session":  # of the guard that the trainer knows
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


def test_a_server_dies_with_both_halves_of_its_guard(server: Server) -> None:
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
def test_stopping_a_server_leaves_nothing_of_it(server: Server, monkeypatch: pytest.MonkeyPatch, killed: str) -> None:
    """Also before the kernel or the keeper have done it, so that a replacement finds the memory free."""
    monkeypatch.setattr("megappo.engines.sglang.server.STOP_SECONDS", 5.0)
    if killed == "both":
        os.kill(other := keeper(server.guard), signal.SIGSTOP)
        os.kill(server.guard.pid, signal.SIGKILL)
        os.kill(other, signal.SIGKILL)
    elif killed == "witness":
        os.kill(server.guard.pid, signal.SIGKILL)
    server.stop()
    # What hid from everybody is known to those who inherit orphans only, and both are dead in one of the cases.
    assert len(sleeping()) <= (2 if killed == "both" else 0)
    assert session_pids(server.session) == [] and not server.scratch.exists()
    assert ServerProcesses(server.session, str(server.scratch)).alive() == []
    assert not server.running


def test_what_cannot_be_killed_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for a driver or a file server takes no signal."""
    monkeypatch.setattr(guard_module, "KILL_SECONDS", 0.2)
    # Nobody's number, so that no signal reaches anybody.
    monkeypatch.setattr(ServerProcesses, "alive", lambda _: [2**22 + 1])
    processes = object.__new__(ServerProcesses)
    start = time.monotonic()
    processes.end()
    assert 0.2 <= time.monotonic() - start < 10
