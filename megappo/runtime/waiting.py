"""Waiting by polling, for events that nobody announces."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], seconds: float, *, every_seconds: float) -> bool:
    """Poll until `holds` is true, for at most so many seconds; returns whether it became true."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_seconds)
    return True


def pause(seconds: float) -> None:
    """Sleep for so many seconds."""
    time.sleep(seconds)
