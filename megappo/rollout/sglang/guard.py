"""Keeps one server alive and nothing of it alive after its owner: a process of its own between trainer and server.

    python guard.py SCRATCH LOG -- COMMAND...

Starts COMMAND in a session of its own, its output in LOG. When the owner closes the guard's standard input, which also
happens when the owner is killed, or when COMMAND ends, every process of that session is ended and what they left in
/dev/shm and in SCRATCH is removed. Standard library only: it must start at once and survive anything.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.5
_SCAN_SECONDS = 5.0
_SHM = "/dev/shm/"
_OWN_SHM = ("sglang_loads_", "sgl_shm_", "torch_", "psm_", "sem.", "nccl-", "cuda.shm.", "multi_tokenizer_args_")
"""What an engine makes there; buckets of the trainer carry the trainer's process id and are left to it."""


def session_pids(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry))
    return found


def shared_files(pids: list[int]) -> set[str]:
    """Files in /dev/shm that these processes map or hold open and that an engine may have made."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if _SHM in line:
                    found.add(line[line.index(_SHM) :].removesuffix(" (deleted)"))
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if target.startswith(_SHM):
                        found.add(target.removesuffix(" (deleted)"))
    return {path for path in found if _made_by(path.removeprefix(_SHM), pids)}


def _made_by(name: str, pids: list[int]) -> bool:
    """torch names its segments after the process that made them."""
    if name.startswith("torch_"):
        return name.split("_")[1] in {str(pid) for pid in pids}
    return name.startswith(_OWN_SHM)


def _signal_all(session: int, number: int) -> None:
    for pid in session_pids(session):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def end_session(session: int, server: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Ask, wait, kill."""
    _signal_all(session, signal.SIGTERM)
    _signal_all(session, signal.SIGCONT)  # a stopped process takes no notice of SIGTERM
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline and session_pids(session):
        server.poll()
        time.sleep(0.05)
    while session_pids(session):
        _signal_all(session, signal.SIGKILL)
        server.poll()
        time.sleep(0.05)
    server.wait()


def main() -> int:
    """Run the command until it or the owner ends."""
    scratch, log, command = sys.argv[1], sys.argv[2], sys.argv[4:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C reaches the owner, whose end is our order
    with open(log, "ab", buffering=0) as out:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, restore_signals=True
        )
    print(server.pid, flush=True)
    files: set[str] = set()
    next_scan = time.monotonic() + _SCAN_SECONDS
    while server.poll() is None:
        ready, _, _ = select.select([sys.stdin], [], [], _POLL_SECONDS)
        if ready and not os.read(sys.stdin.fileno(), 1):
            break
        if time.monotonic() >= next_scan:
            files |= shared_files(session_pids(server.pid))
            next_scan = time.monotonic() + _SCAN_SECONDS
    files |= shared_files(session_pids(server.pid))
    end_session(server.pid, server, _GRACE_SECONDS if server.poll() is None else 0.0)
    for path in files:
        with suppress(OSError):
            os.unlink(path)
    shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
