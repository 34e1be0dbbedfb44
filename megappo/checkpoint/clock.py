"""Decides by time when a checkpoint is due, and when a run must write its last checkpoint."""

from __future__ import annotations

from collections import deque


class Clock:
    """Limits the training time that a killed run can lose. All times are seconds of one monotonic clock."""

    def __init__(self, every_minutes: float | None, now: float) -> None:
        """Start the clock. `every_minutes`: maximum time between two checkpoints; None: no limit."""
        self._most_seconds = 60 * every_minutes if every_minutes is not None else None
        self._saved = self._last_step = now

    def is_late(self, now: float) -> bool:
        """Return whether the next step would end too late, if the step takes as long as the last step. Must be called
        after every step."""
        step, self._last_step = now - self._last_step, now
        return self._most_seconds is not None and now + step - self._saved > self._most_seconds

    def restart(self, now: float) -> None:
        """Restart the clock after a checkpoint."""
        self._saved = now


class Deadline:
    """Deadline for the stop of a run with a checkpoint. All times are seconds of one monotonic clock."""

    SLACK = 1.2
    """Allowed ratio of the next step to the longest of the last steps."""
    LEAST_SECONDS = 60.0
    """Minimum time for a stop in seconds. A stop finishes a running checkpoint and writes another checkpoint."""

    def __init__(self, end: float | None, now: float) -> None:
        """Create a deadline. `end`: time of the stop; None: no deadline."""
        self._end, self._last_step = end, now
        self._steps = deque[float](maxlen=10)
        self._writing = 0.0

    def start(self, now: float) -> None:
        """Record the start of the first step, so that the startup does not count as a step."""
        self._last_step = now

    def wrote(self, seconds: float) -> None:
        """Record the seconds of a written checkpoint."""
        self._writing = max(self._writing, seconds)

    def is_near(self, now: float) -> bool:
        """Return whether the remaining time is too short for another step and a stop. Must be called after every step
        and its evaluation or checkpoint."""
        self._steps.append(now - self._last_step)
        self._last_step = now
        needed = self.SLACK * max(self._steps) + max(self.LEAST_SECONDS, 2 * self._writing)
        return self._end is not None and now + needed > self._end
