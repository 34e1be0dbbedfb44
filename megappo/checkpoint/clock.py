"""Decides by the clock when a checkpoint is due, and when the last one before the end is."""

from __future__ import annotations

from collections import deque


class Clock:
    """Bounds the minutes of training that a killed run can lose. All times are seconds of one monotonic clock."""

    def __init__(self, every_minutes: float | None, now: float) -> None:
        """`every_minutes`: the longest time between two checkpoints; None: the clock never asks for one."""
        self._most_seconds = 60 * every_minutes if every_minutes is not None else None
        self._saved = self._asked = now

    def is_late(self, now: float) -> bool:
        """Whether the next step, if it takes as long as this one, would end too late; asked after every step."""
        step, self._asked = now - self._asked, now
        return self._most_seconds is not None and now + step - self._saved > self._most_seconds

    def restart(self, now: float) -> None:
        """Restart the count, as a checkpoint was just taken."""
        self._saved = now


class Deadline:
    """The time by which a run must have stopped with a checkpoint. All times are seconds of one monotonic clock."""

    SLACK = 1.2
    """Factor by which the next step may take longer than the longest of the last ones."""
    LEAST_SECONDS = 60.0
    """Least seconds allowed for a stop, whatever was measured: a checkpoint under way is waited for, and another one is
    written."""

    def __init__(self, end: float | None, now: float) -> None:
        """`end`: time by which the run must have stopped; None: there is none."""
        self._end, self._asked = end, now
        self._steps = deque[float](maxlen=10)
        self._writing = 0.0

    def start(self, now: float) -> None:
        """Note that the first step begins, so that the start does not count as a step."""
        self._asked = now

    def wrote(self, seconds: float) -> None:
        """Note the seconds in which a checkpoint was written."""
        self._writing = max(self._writing, seconds)

    def is_near(self, now: float) -> bool:
        """Whether there is no time left for another step and a stop; asked after every step, with what followed it."""
        self._steps.append(now - self._asked)
        self._asked = now
        needed = self.SLACK * max(self._steps) + max(self.LEAST_SECONDS, 2 * self._writing)
        return self._end is not None and now + needed > self._end
