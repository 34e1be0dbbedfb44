"""Control of all descendants of a process, including descendants in separate sessions.

If the parent of a process ends, its nearest ancestor that is a subreaper becomes the new parent (`prctl(2)`).
Therefore, no process that a reward function starts can escape the supervisor of its worker.
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
    """Request a signal from the kernel when the thread that created this process ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the new parent of every descendant whose parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")


def reap() -> set[int] | None:
    """Reap ended children. Return their process ids, or None if no child remains."""
    ended: set[int] = set()
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    except ChildProcessError:
        return None
    return ended


def end_descendants() -> None:
    """Kill all descendants of this process with SIGKILL until no child remains. The process must have adopted orphans.

    Processes that cannot be killed, such as processes of another user, remain after `_KILL_SECONDS`.
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
    """Kill every process with this environment variable by SIGKILL, such as orphans of a killed supervisor."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variable) == value:
                process.kill()
