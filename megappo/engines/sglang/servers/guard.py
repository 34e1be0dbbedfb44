"""Supervise one server and remove all its traces after its owner ends. Two processes run between trainer and server.

    python guard.py SCRATCH LOG CORES -- COMMAND...

Starts COMMAND in a new session, with its output in LOG, on the cores CORES such as 0,1,2. Empty CORES selects the
cores of the guard. The owner ends the server by closing the standard input of the guard. The input also closes if the
owner is killed. After this event, or after the end of COMMAND, all processes of COMMAND are ended. The files of
COMMAND in /dev/shm and in SCRATCH are then removed. The keeper process starts COMMAND and does this work. The witness
process is started by the owner and does the work if the keeper was killed. If the witness was killed, the keeper also
ends COMMAND. If both were killed at once, the kernel kills the server. The module imports only the standard library,
so that it starts quickly and does not depend on other packages.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

KILL_SECONDS = 10.0
_POLL_SECONDS = 0.5
_SCAN_SECONDS = 5.0
_MARK = "MEGAPPO_SERVER_SCRATCH"
"""Environment variable that all processes of a server inherit, including processes in other sessions."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHM = "/dev/shm/"
_OWN_SHM = ("sglang_loads_", "sgl_shm_", "torch_", "psm_", "sem.", "nccl-", "cuda.shm.", "multi_tokenizer_args_")
"""Name prefixes of the files that a server creates in /dev/shm. SGLang leaves such files after a kill (0.5.23).
Buckets of the trainer have the process id of the trainer and are not removed."""


class _Process(NamedTuple):
    parent: int
    session: int
    start: int
    """Start time in clock ticks. Distinguishes a process from a later process with the same id."""


def _processes() -> dict[int, _Process]:
    """Return all processes of this machine by id, except zombies."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    found[int(entry)] = _Process(int(fields[1]), int(fields[3]), int(fields[19]))
    return found


def session_pids(session: int) -> list[int]:
    """Return the ids of the processes of a session."""
    return [pid for pid, process in _processes().items() if process.session == session]


class ServerProcesses:
    """The processes of a server: the processes of its session, the processes with its mark in the environment, and
    all descendants. Descendants are stored, so that they are found after the end of their parent."""

    def __init__(self, session: int, scratch: str, guard: int | None = None) -> None:
        """Create the set of processes. `guard` is a process that inherits orphans of the server and has no other
        children."""
        assert session > 1
        self._session, self._guard, self._mark = session, guard, f"{_MARK}={scratch}".encode()
        self._seen: set[tuple[int, int]] = set()

    def alive(self) -> list[int]:
        """Return the ids of the running processes, without this process and its ancestors."""
        table = _processes()
        pid = os.getpid()
        while pid in table:
            pid = table.pop(pid).parent
        found = {
            pid
            for pid, process in table.items()
            if process.session == self._session
            or process.parent == self._guard
            or (pid, process.start) in self._seen
            or self._is_marked(pid)
        }
        while more := {pid for pid, process in table.items() if process.parent in found} - found:
            found |= more
        self._seen |= {(pid, table[pid].start) for pid in found}
        return sorted(found)

    def _is_marked(self, pid: int) -> bool:
        with suppress(OSError):
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    def end(self) -> None:
        """Kill the processes. Returns when all processes have ended, or after `KILL_SECONDS` if a driver blocks the
        end of some processes.

        The signal is SIGKILL and not SIGTERM. After SIGTERM, the remaining processes of SGLang would report the end
        of the others as a crash, and with TP of 2 the server drains for more than 10 s (0.5.23).
        """
        deadline = time.monotonic() + KILL_SECONDS
        while (found := self.alive()) and time.monotonic() < deadline:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def shared_files(pids: list[int]) -> set[str]:
    """Return the files in /dev/shm that these processes map or have open, and that a server may have created."""
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
    """Return whether a server created a file in /dev/shm. torch writes the process id into the names of its
    segments."""
    if name.startswith("torch_"):
        return name.split("_")[1] in {str(pid) for pid in pids}
    return name.startswith(_OWN_SHM)


def clean_up(processes: ServerProcesses, files: set[str], scratch: str) -> None:
    """End a server and remove its remaining files: `files`, its current files in shared memory, and last its scratch
    folder."""
    files = files | shared_files(processes.alive())
    processes.end()
    for path in files:
        with suppress(OSError):
            os.unlink(path)
    shutil.rmtree(scratch, ignore_errors=True)


def _start(command: list[str], scratch: str, log: str, cores: set[int]) -> subprocess.Popen[bytes]:
    """Start the server. The kernel kills the server when this process ends."""
    keeper, libc = os.getpid(), ctypes.CDLL(None)

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if cores:
            with suppress(OSError):  # the job has lost all of these cores; the cores of the owner remain
                os.sched_setaffinity(0, cores)
        if os.getppid() != keeper:  # the keeper ended before prctl, which would not notice
            os._exit(1)

    with open(log, "ab", buffering=0) as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=prepare,
            env=os.environ | {_MARK: scratch},
        )


def _keep(command: list[str], scratch: str, log: str, cores: set[int], witness: int, report: int) -> None:
    """Run the command until the command, the owner or the witness ends. `witness` is a pipe that closes with the
    witness. `report` is a pipe with the data that the witness needs for cleaning up."""
    os.setsid()  # a signal to the session of the witness does not reach this process
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = _start(command, scratch, log, cores)
    processes, files = ServerProcesses(server.pid, scratch, os.getpid()), set[str]()
    said = f"server {server.pid}\n"
    while server.poll() is None:
        with suppress(BrokenPipeError):
            os.write(report, said.encode())
        next_scan, ready = time.monotonic() + _SCAN_SECONDS, list[int]()
        while not ready and server.poll() is None and time.monotonic() < next_scan:
            ready, _, _ = select.select([sys.stdin.fileno(), witness], [], [], _POLL_SECONDS)
        if any(not os.read(descriptor, 1) for descriptor in ready):
            break
        found = shared_files(processes.alive())
        said = "".join(f"file {path}\n" for path in sorted(found - files))
        files |= found
    clean_up(processes, files, scratch)
    with suppress(BrokenPipeError):
        os.write(report, b"done\n")


def _watch(scratch: str, report: int) -> None:
    """Send the process id of the server to the owner, and do the work of the keeper if the keeper was killed."""
    session, files = 0, set[str]()
    with os.fdopen(report, encoding="utf-8") as lines:
        for line in lines:
            word, _, value = line.rstrip("\n").partition(" ")
            if word == "done":
                return
            if word == "file":
                files.add(value)
            else:
                session = int(value)
                print(session, flush=True)
    if session:
        clean_up(ServerProcesses(session, scratch, os.getpid()), files, scratch)
    shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    """Run the command until the command or its owner ends."""
    scratch, log, command = sys.argv[1], sys.argv[2], sys.argv[5:]
    cores = {int(core) for core in sys.argv[3].split(",") if core}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C ends the owner, and the end of the owner ends the server
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    witness, alive = os.pipe()
    report, reports = os.pipe()
    if os.fork() == 0:
        os.close(alive)
        os.close(report)
        _keep(command, scratch, log, cores, witness, reports)
    else:
        os.close(witness)
        os.close(reports)
        _watch(scratch, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
