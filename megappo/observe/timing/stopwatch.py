"""Seconds and peak memory of the stages of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Lap:
    """Time of a stage. `seconds` is valid after the block of the stage."""

    seconds: float = 0.0


class StageTimer:
    """Collects seconds and peak memory per stage since the last `reset`. Stages do not nest."""

    def __init__(
        self,
        synchronize: Callable[[], object] = lambda: None,
        on_enter: Callable[[str], object] = lambda _: None,
        peak_since: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Start the clock of the first step.

        Args:
            synchronize: waits for the device, so that the time of a stage includes all work of the stage.
            on_enter: called with the name of each stage before the clock of the stage starts.
            peak_since: returns the peak memory since the last call, in GB (1e9 bytes).
        """
        self._synchronize, self._on_enter, self._peak_since = synchronize, on_enter, peak_since
        self._running: str | None = None
        self.seconds: dict[str, float] = {}
        """Seconds of each stage since the last `reset`, in the order of the stages."""
        self.peaks: dict[str, float] = {}
        """Peak memory of each stage since the last `reset`, in GB (1e9 bytes)."""
        self.peak = 0.0
        """Peak memory since the first stage, in stages and between stages."""
        self._start = time.perf_counter()

    def reset(self) -> None:
        """Begin a step. Must not be called inside a stage."""
        assert self._running is None, f"the clock was reset inside stage {self._running}"
        self.seconds, self.peaks = {}, {}
        self._start = time.perf_counter()

    def _measured_peak(self) -> float:
        peak = self._peak_since()
        self.peak = max(self.peak, peak)
        return peak

    @property
    def total(self) -> float:
        """Seconds since the last reset."""
        return time.perf_counter() - self._start

    @contextmanager
    def stage(self, name: str) -> Iterator[Lap]:
        """Measure the time of a block. Blocks with the same name are summed."""
        assert self._running is None, f"stage {name} began inside stage {self._running}"
        self._on_enter(name)
        self._measured_peak()  # peak between stages
        self._running = name
        lap, start = Lap(), time.perf_counter()
        try:
            yield lap
            self._synchronize()
        finally:
            self._running = None
            lap.seconds = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + lap.seconds
            self.peaks[name] = max(self.peaks.get(name, 0.0), self._measured_peak())
