"""Progress of the current stage of this rank.

Each process has one global object, because nested calls and separate threads of generation and updates count their
work. The console shows the progress while a long stage runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Count:
    """Number of finished items, expected number of items, and tokens of the finished items."""

    total: int
    since: float
    done: int = 0
    tokens: int = 0
    remark: str = ""


class StageProgress:
    """The current stage and counts of its work. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stage, self._waits_for, self._since = "", "", clock()
        self._counts: dict[str, _Count] = {}
        self._parts = 0
        self._servers = (0, 0)

    def enter(self, stage: str, waits_for: str = "") -> None:
        """Begin a stage. Counts are reset, except the counts of unfinished generation for later steps."""
        with self._lock:
            self._stage, self._waits_for, self._since = stage, waits_for, self._clock()
            ahead = {name: count for name, count in self._counts.items() if name in (SAMPLES, EPISODES)}
            self._counts = {name: count for name, count in ahead.items() if count.done < count.total}

    def leave(self) -> None:
        """End the stage. Nothing is shown until the next stage."""
        with self._lock:
            self._stage = ""

    def expect(self, what: str, total: int) -> None:
        """Start counting up to `total` of `what`, such as `SAMPLES`."""
        with self._lock:
            self._counts[what] = _Count(total, self._clock())

    def add(self, what: str, number: int, tokens: int = 0) -> None:
        """Add `number` finished items of `what` and their tokens. The count is shown after `expect`."""
        with self._lock:
            self._parts += 1
            if what in self._counts:
                self._counts[what].done += number
                self._counts[what].tokens += tokens

    def remark(self, what: str, text: str) -> None:
        """Show a text after the count of `what`."""
        with self._lock:
            if what in self._counts:
                self._counts[what].remark = text

    def drop(self, what: str) -> None:
        """Stop counting `what` after the end of the work."""
        with self._lock:
            self._counts.pop(what, None)

    def note_servers(self, busy: int, of: int) -> None:
        """Store how many of the engine's servers have pending requests of this rank. With `of` 0, nothing is shown."""
        with self._lock:
            self._servers = (busy, of)

    def forget(self) -> None:
        """Reset all counts after the work was cancelled."""
        with self._lock:
            self._counts.clear()

    @property
    def parts(self) -> int:
        """Number of `add` calls in this process. An increase proves progress."""
        with self._lock:
            return self._parts

    @property
    def seconds(self) -> float:
        """Seconds since the stage began, or 0 without a stage."""
        with self._lock:
            return self._clock() - self._since if self._stage else 0.0

    def text(self) -> str:
        """Return one line, such as `rollout for 3 min 5 s: 12 of 64 samples of this rank, 1,234 tokens/s, about 13 min
        20 s left, 3 of 4 servers busy; waits for ...`."""
        with self._lock:
            if not self._stage:
                return ""
            now = self._clock()
            counts = [_count_text(name, count, now) for name, count in self._counts.items()]
            busy, servers = self._servers
            counts += [f"{busy} of {servers} servers busy"] if servers and {SAMPLES, EPISODES} & {*self._counts} else []
            counted = ", ".join(counts)
            waits = f"; waits for {self._waits_for}" if self._waits_for else ""
            return f"{self._stage} for {duration(now - self._since)}{': ' if counted else ''}{counted}{waits}"


def _count_text(name: str, count: _Count, now: float) -> str:
    text = f"{count.done:,} of {count.total:,} {name}"
    if count.remark:
        text += f", {count.remark}"
    if count.tokens and now > count.since:
        text += f", {count.tokens / (now - count.since):,.0f} tokens/s"
    if 0 < count.done < count.total:  # estimated from the speed so far; long responses finish last
        text += f", about {duration((now - count.since) / count.done * (count.total - count.done))} left"
    return text


def duration(seconds: float) -> str:
    """Return a duration as text: `5 s`, `3 min 5 s`, `2 h 3 min` or `4 d 2 h`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days} d {hours_left} h"
    if hours:
        return f"{hours} h {minutes_left} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


PROGRESS = StageProgress()
"""Progress of this process. The console reads this object."""
SAMPLES = "samples of this rank"
EPISODES = "episodes of this rank"
MICROBATCHES = "microbatches"
WEIGHTS = "bytes of weights"
