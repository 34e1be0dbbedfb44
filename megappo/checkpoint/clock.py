"""When a checkpoint is due by the clock, and when the last one is."""

from __future__ import annotations

from collections import deque


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


class Deadline:
    """The time by which a run must have stopped with a checkpoint. All times are seconds of one monotonic clock."""

    SLACK = 1.2
    """The next step may take so much longer than the longest of the last ones."""
    LEAST_SECONDS = 60.0
    """What stopping may take whatever was seen of it: a checkpoint under way is waited for, and one is written."""

    def __init__(self, end: float | None, now: float) -> None:
        """`end`: None where there is none."""
        self._end, self._asked = end, now
        self._steps = deque[float](maxlen=10)
        self._writing = 0.0

    def start(self, now: float) -> None:
        """The first step begins; what was before took as long as it did."""
        self._asked = now

    def wrote(self, seconds: float) -> None:
        """A checkpoint was written in so many."""
        self._writing = max(self._writing, seconds)

    def is_near(self, now: float) -> bool:
        """Asked after every step, with what came after it: whether there is no time for another one and a stop."""
        self._steps.append(now - self._asked)
        self._asked = now
        needed = self.SLACK * max(self._steps) + max(self.LEAST_SECONDS, 2 * self._writing)
        return self._end is not None and now + needed > self._end
