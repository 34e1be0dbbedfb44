"""All descendants of a process, those in sessions of their own included, and how they are ended.

A process whose parent ends becomes a child of its nearest ancestor that is a subreaper (`prctl(2)`), so that no process
that a reward function starts can leave its worker's supervisor.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

import psutil

from megappo.runtime.waiting import wait_until

# Option numbers of linux/prctl.h.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.01


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the thread that made it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")


def reap() -> set[int] | None:
    """Process ids of the children that have ended since; None where no child is left."""
    ended: set[int] = set()
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    except ChildProcessError:
        return None
    return ended


def end_descendants() -> None:
    """SIGKILL all descendants of this process, which has adopted its orphans, until it has no child.

    A process that cannot be killed, such as another user's, is left after `_KILL_SECONDS`.
    """

    def all_ended() -> bool:
        if reap() is None:
            return True
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        return False

    wait_until(all_ended, _KILL_SECONDS, every_seconds=_POLL_SECONDS)


def end_marked(variable: str, value: str) -> None:
    """SIGKILL every process with this environment variable: it finds the orphans of a supervisor that was killed."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variable) == value:
                process.kill()
