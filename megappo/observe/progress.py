"""Progress of this rank's current stage, counted where work is done and shown on request.

There is one per process: generation and updates count in nested calls and in threads of their own, and a stage of
minutes must be reported while it goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Count:
    """Number of done and of expected things, and the tokens in them."""

    total: int
    since: float
    done: int = 0
    tokens: int = 0
    remark: str = ""


class StageProgress:
    """A stage and the counts in it. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stage, self._waits_for, self._since = "", "", clock()
        self._counts: dict[str, _Count] = {}
        self._parts = 0
        self._servers = (0, 0)

    def enter(self, stage: str, waits_for: str = "") -> None:
        """Begin a stage. Counts are reset, except those of generation ahead that is not finished."""
        with self._lock:
            self._stage, self._waits_for, self._since = stage, waits_for, self._clock()
            ahead = {name: count for name, count in self._counts.items() if name in (SAMPLES, EPISODES)}
            self._counts = {name: count for name, count in ahead.items() if count.done < count.total}

    def leave(self) -> None:
        """End the stage; nothing is shown until the next begins."""
        with self._lock:
            self._stage = ""

    def expect(self, what: str, total: int) -> None:
        """Start counting up to `total` of `what`, such as `SAMPLES`."""
        with self._lock:
            self._counts[what] = _Count(total, self._clock())

    def add(self, what: str, number: int, tokens: int = 0) -> None:
        """Count `number` more as done; shown where a total is expected."""
        with self._lock:
            self._parts += 1
            if what in self._counts:
                self._counts[what].done += number
                self._counts[what].tokens += tokens

    def remark(self, what: str, words: str) -> None:
        """Show words behind the number of `what` that are done."""
        with self._lock:
            if what in self._counts:
                self._counts[what].remark = words

    def drop(self, what: str) -> None:
        """Stop counting `what`, whose work has ended."""
        with self._lock:
            self._counts.pop(what, None)

    def note_servers(self, busy: int, of: int) -> None:
        """Note how many of the engine's servers have pending requests of this rank; with `of` 0 nothing is shown."""
        with self._lock:
            self._servers = (busy, of)

    def forget(self) -> None:
        """Reset all counts, as their work was given up."""
        with self._lock:
            self._counts.clear()

    @property
    def parts(self) -> int:
        """Number of parts of work that this process has done; while it grows, work goes on."""
        with self._lock:
            return self._parts

    @property
    def seconds(self) -> float:
        """Seconds since the stage began; 0 where there is none."""
        with self._lock:
            return self._clock() - self._since if self._stage else 0.0

    def text(self) -> str:
        """One line such as `rollout for 3 min 5 s: 12 of 64 samples of this rank, 1,234 tokens/s, about 13 min 20 s
        left, 3 of 4 servers busy; waits for ...`."""
        with self._lock:
            if not self._stage:
                return ""
            now = self._clock()
            counts = [_words(name, count, now) for name, count in self._counts.items()]
            busy, servers = self._servers
            counts += [f"{busy} of {servers} servers busy"] if servers and {SAMPLES, EPISODES} & {*self._counts} else []
            counted = ", ".join(counts)
            waits = f"; waits for {self._waits_for}" if self._waits_for else ""
            return f"{self._stage} for {duration(now - self._since)}{': ' if counted else ''}{counted}{waits}"


def _words(name: str, count: _Count, now: float) -> str:
    words = f"{count.done:,} of {count.total:,} {name}"
    if count.remark:
        words += f", {count.remark}"
    if count.tokens and now > count.since:
        words += f", {count.tokens / (now - count.since):,.0f} tokens/s"
    if 0 < count.done < count.total:  # at the pace so far; long responses come last
        words += f", about {duration((now - count.since) / count.done * (count.total - count.done))} left"
    return words


def duration(seconds: float) -> str:
    """Duration as `5 s`, `3 min 5 s`, `2 h 3 min` or `4 d 2 h`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days} d {hours_left} h"
    if hours:
        return f"{hours} h {minutes_left} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


PROGRESS = StageProgress()
"""The progress of this process, counted where work is done and read by the console."""
SAMPLES = "samples of this rank"
EPISODES = "episodes of this rank"
MICROBATCHES = "microbatches"
WEIGHTS = "bytes of weights"
