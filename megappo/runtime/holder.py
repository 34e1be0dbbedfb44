"""A file that replaces the lock of a run directory on a file system without locks.

The file contains the identity of the process. It is created with O_EXCL, which is atomic also on network file systems
(open(2)). A killed process leaves the file. A later start removes the file if the process no longer exists on the same
machine, or if SLURM has restarted the same job.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megappo.errors import whole_number

NAME = "lock.holder"


@dataclass(frozen=True)
class Holder:
    """The identity of a process, for other processes."""

    host: str
    boot: str
    """Boot id of the machine."""
    namespace: str
    """Namespace in which the process number is unique."""
    process: int
    start_ticks: int
    """Start time of the process in clock ticks since boot, because process numbers are reused."""
    job: str = ""
    """Number of the SLURM job; "" outside of SLURM."""
    restarts: int = 0
    """Number of restarts of the job by SLURM."""

    @property
    def summary(self) -> str:
        """Name of the process in error messages."""
        return f"process {self.process} on {self.host}" + (f", job {self.job}" if self.job else "")

    def is_gone(self, reader: Holder) -> bool:
        """Return whether `reader`, a running process, can be certain that this process has ended."""
        if self.job and self.job == reader.job and self.restarts < reader.restarts:
            return True
        if self.host != reader.host:
            return False
        if self.boot != reader.boot:  # the machine was rebooted
            return True
        return self.namespace == reader.namespace and start_ticks(self.process) != self.start_ticks


def this_process(environment: Mapping[str, str]) -> Holder:
    """Return the identity of this process."""
    return Holder(
        socket.gethostname(),
        boot_id(),
        os.readlink("/proc/self/ns/pid"),
        os.getpid(),
        start_ticks(os.getpid()) or 0,
        environment.get("SLURM_JOB_ID", ""),
        whole_number(environment.get("SLURM_RESTART_COUNT", "")) or 0,
    )


def boot_id() -> str:
    """Return the identity of the current boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def start_ticks(process: int) -> int | None:
    """Return the clock ticks between boot and the start of a process of this machine; None if the process does not
    exist (proc_pid_stat(5), field 22)."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def take(path: Path, own: Holder) -> Holder | None:
    """Create the file for `own`. The file of a process that no longer exists is removed first.

    Returns the holder of the file if the process of the holder may still be running, otherwise None. Raises OSError if
    the file cannot be written.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            holder = read(path)
            if holder is None:
                if not path.exists():
                    continue  # removed in the meantime
                return Holder("an unknown machine", "", "", 0, 0)
            if not holder.is_gone(own):
                return holder
            _remove(path, holder)
            continue
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(own), file)
                file.flush()
                os.fsync(file.fileno())
        except OSError:  # a full disk
            path.unlink()
            raise
        return None


def release(path: Path, own: Holder) -> None:
    """Remove the file if it contains `own`."""
    if read(path) == own:
        path.unlink(missing_ok=True)


def read(path: Path) -> Holder | None:
    """Return the holder in a file, or None if the file does not exist or is not valid."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _remove(path: Path, gone: Holder) -> None:
    """Remove the file of a process that is gone. The file is first renamed. If several processes remove the file at the
    same time, only one succeeds, and a new file is not removed."""
    aside = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    with suppress(FileNotFoundError):
        os.rename(path, aside)
        if read(aside) == gone:
            aside.unlink()
        elif not path.exists():  # renamed the file of a new process
            os.rename(aside, path)
