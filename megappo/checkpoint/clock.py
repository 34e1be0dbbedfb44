"""When a checkpoint is due by the clock."""

from __future__ import annotations


class Clock:
    """Bounds the minutes of training that a killed run can lose. All times are seconds of one monotonic clock."""

    def __init__(self, every_minutes: float | None, now: float) -> None:
        """`every_minutes`: the longest time between two checkpoints; None: the clock never asks for one."""
        self._most_seconds = 60 * every_minutes if every_minutes is not None else None
        self._saved = self._asked = now

    def is_late(self, now: float) -> bool:
        """Asked after every step: whether the next one, if it takes as long as this one, would end too late."""
        step, self._asked = now - self._asked, now
        return self._most_seconds is not None and now + step - self._saved > self._most_seconds

    def restart(self, now: float) -> None:
        """Count from now, where a checkpoint was just taken."""
        self._saved = now
