"""The next rank on this machine, whose end this rank notices while it waits for something else.

A silent end, such as a kill by the kernel for lack of memory, is thus known at once, with the rank, even where no
connection breaks, as for a rank that waits at the store. Every rank watches one other.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import psutil

from megappo.runtime.notices import Notices

_PROCESS, _DONE = "megappo/process", "megappo/done"


@dataclass(frozen=True)
class Neighbour:
    """A process on this machine."""

    rank: int
    process: psutil.Process

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return has_ended(self.process)

    def is_done(self, notices: Notices) -> bool:
        """Whether the process announced its end. Raises DistError where the store is gone."""
        return notices.count(f"{_DONE}/{self.rank}") > 0

    @property
    def summary(self) -> str:
        """Sentence on how the process ended."""
        return (
            f"process {self.process.pid} on {socket.gethostname()} ended without a word, as one does that the kernel "
            "kills for a lack of memory; `dmesg` there says whether it did"
        )


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or waits for its parent to notice."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def introduce(notices: Notices, rank: int, local_rank: int) -> None:
    """Post which process this rank is. Raises DistError."""
    notices.post(f"{_PROCESS}/{socket.gethostname()}/{local_rank}", f"{rank} {os.getpid()} {_began(os.getpid())}")


def find_neighbour(notices: Notices, local_rank: int, local_world_size: int) -> Neighbour | None:
    """The rank after this one on the machine; None where it has not been introduced, or is invisible from here, as from
    another container. Raises DistError."""
    said = notices.text(f"{_PROCESS}/{socket.gethostname()}/{(local_rank + 1) % local_world_size}")
    if not said:
        return None
    rank, pid, began = said.split()
    try:
        process = psutil.Process(int(pid))
        return Neighbour(int(rank), process) if _began(process.pid) == began else None
    except psutil.Error:
        return None


def say_done(notices: Notices, rank: int) -> None:
    """Announce that this rank is about to end normally. Raises DistError."""
    notices.count(f"{_DONE}/{rank}", 1)
    notices.count(_DONE, 1)


def all_done(notices: Notices, world_size: int) -> bool:
    """Whether all ranks have announced their end. Raises DistError."""
    return notices.count(_DONE) >= world_size


def _began(pid: int) -> str:
    return f"{psutil.Process(pid).create_time():.2f}"
