"""Waiting for what nobody announces."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], seconds: float, *, every_seconds: float) -> bool:
    """Ask again and again until something holds, for at most so long; whether it did."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_seconds)
    return True


def pause(seconds: float) -> None:
    """Let that time go by."""
    time.sleep(seconds)
