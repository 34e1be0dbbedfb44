"""Detection of the end of the next rank on the same machine.

A process may end without a message, for example if the kernel kills it for a lack of memory. The watching rank then
reports the end at once, with the number of the rank. This also works if no connection breaks, for example for a rank
that waits at the store. Each rank watches the process of the next rank.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import psutil

from megappo.runtime.watch.notices import Notices

_PROCESS, _DONE = "megappo/process", "megappo/done"


@dataclass(frozen=True)
class NextRank:
    """The process of the next rank on this machine."""

    rank: int
    process: psutil.Process

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return has_ended(self.process)

    def is_done(self, notices: Notices) -> bool:
        """Return whether the rank has announced its end. Raises DistError if the store is gone."""
        return notices.count(f"{_DONE}/{self.rank}") > 0

    @property
    def summary(self) -> str:
        """Sentence about the end of the process."""
        return (
            f"process {self.process.pid} on {socket.gethostname()} ended without a message, as after a kill by the "
            "kernel for a lack of memory; check `dmesg` on this machine"
        )


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process is gone, or is a zombie."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def introduce(notices: Notices, rank: int, local_rank: int) -> None:
    """Post the rank and the process of this rank in the store. Raises DistError if the store is gone."""
    notices.post(f"{_PROCESS}/{socket.gethostname()}/{local_rank}", f"{rank} {os.getpid()} {_began(os.getpid())}")


def find_next_rank(notices: Notices, local_rank: int, local_world_size: int) -> NextRank | None:
    """Return the rank after this one on the machine.

    Returns None if this rank has not been introduced, or if its process is invisible, for example in another container.
    Raises DistError if the store is gone.
    """
    text = notices.text(f"{_PROCESS}/{socket.gethostname()}/{(local_rank + 1) % local_world_size}")
    if not text:
        return None
    rank, pid, began = text.split()
    try:
        process = psutil.Process(int(pid))
        return NextRank(int(rank), process) if _began(process.pid) == began else None
    except psutil.Error:
        return None


def announce_done(notices: Notices, rank: int) -> None:
    """Announce that this rank is about to end normally. Raises DistError if the store is gone."""
    notices.count(f"{_DONE}/{rank}", 1)
    notices.count(_DONE, 1)


def all_done(notices: Notices, world_size: int) -> bool:
    """Return whether all ranks have announced their end. Raises DistError if the store is gone."""
    return notices.count(_DONE) >= world_size


def _began(pid: int) -> str:
    return f"{psutil.Process(pid).create_time():.2f}"
