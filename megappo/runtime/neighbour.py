"""The next rank on this machine, whose end this one notices although it waits for something else.

So that an end without a word, such as a kill by the kernel for a lack of memory, is known at once, with the rank, and
also where nothing breaks by it, as for a rank that waits at the store. Every rank looks at one.
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
        """Whether it has ended."""
        try:
            return not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True

    def is_done(self, notices: Notices) -> bool:
        """Whether it said that it would end. Raises DistError where nobody keeps the store any more."""
        return notices.count(f"{_DONE}/{self.rank}") > 0

    @property
    def words(self) -> str:
        """How it ended."""
        return (
            f"process {self.process.pid} on {socket.gethostname()} ended without a word, as one does that the kernel "
            "kills for a lack of memory; `dmesg` there says whether it did"
        )


def introduce(notices: Notices, rank: int, local_rank: int) -> None:
    """Say which process this rank is. Raises DistError."""
    notices.post(f"{_PROCESS}/{socket.gethostname()}/{local_rank}", f"{rank} {os.getpid()} {_began(os.getpid())}")


def find_neighbour(notices: Notices, local_rank: int, local_world_size: int) -> Neighbour | None:
    """The one after this rank; None where it has not been introduced, or cannot be seen from here, as from another
    container. Raises DistError."""
    said = notices.words(f"{_PROCESS}/{socket.gethostname()}/{(local_rank + 1) % local_world_size}")
    if not said:
        return None
    rank, pid, began = said.split()
    try:
        process = psutil.Process(int(pid))
        return Neighbour(int(rank), process) if _began(process.pid) == began else None
    except psutil.Error:
        return None


def say_done(notices: Notices, rank: int) -> None:
    """This rank is about to end as it should. Raises DistError."""
    notices.count(f"{_DONE}/{rank}", 1)
    notices.count(_DONE, 1)


def all_done(notices: Notices, world_size: int) -> bool:
    """Whether all ranks have said so. Raises DistError."""
    return notices.count(_DONE) >= world_size


def _began(pid: int) -> str:
    return f"{psutil.Process(pid).create_time():.2f}"
