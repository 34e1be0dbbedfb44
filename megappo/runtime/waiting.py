"""Waiting by polling, for events without a notification."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float, *, every_seconds: float) -> bool:
    """Poll until `condition` is true, for at most `seconds` seconds. Returns whether it became true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_seconds)
    return True


def pause(seconds: float) -> None:
    """Sleep for `seconds` seconds."""
    time.sleep(seconds)
