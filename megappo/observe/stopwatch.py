"""Seconds per stage of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Lap:
    """One timed stage; `seconds` is valid after its block."""

    seconds: float = 0.0


class StageTimer:
    """Collects seconds per stage since the last `reset`; stages do not nest."""

    def __init__(
        self, synchronize: Callable[[], None] | None = None, on_enter: Callable[[str], None] | None = None
    ) -> None:
        """Start the clock of the first step.

        Args:
            synchronize: waits for the device, so that a stage's time is that of its own work.
            on_enter: called with the name of each stage before its clock starts.
        """
        self._synchronize = synchronize
        self._on_enter = on_enter
        self._running: str | None = None
        self.seconds: dict[str, float] = {}
        """Seconds of each stage since the last `reset`, in the order in which they began."""
        self._start = time.perf_counter()

    def reset(self) -> None:
        """Begin a step; not inside a stage."""
        assert self._running is None, f"the clock was reset inside stage {self._running}"
        self.seconds = {}
        self._start = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds since the last reset."""
        return time.perf_counter() - self._start

    @contextmanager
    def stage(self, name: str) -> Iterator[Lap]:
        """Time a block; blocks with the same name are summed."""
        assert self._running is None, f"stage {name} began inside stage {self._running}"
        if self._on_enter is not None:
            self._on_enter(name)
        self._running = name
        lap, start = Lap(), time.perf_counter()
        try:
            yield lap
            if self._synchronize is not None:
                self._synchronize()
        finally:
            self._running = None
            lap.seconds = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + lap.seconds
