"""End of a run that hangs, with a record of the state of every rank."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from megappo.errors import HANG, RUN_ERROR
from megappo.observe.terminal.progress import PROGRESS
from megappo.runtime.process import Runtime
from megappo.runtime.watch.failures import Failure, work_within

_POLL_SECONDS = 0.5
_BLOCKED_SECONDS = 60.0
"""Delay of the timer that does not need the interpreter, so that the thread can report first."""
_STDERR = 2
_COUNT_SECONDS = 1.0
"""Shortest interval between two counts of progress. Each count is a request to the store."""
_DISK_SECONDS = 10.0
"""Limit of an access to the run directory, because its disk may be the reason of the hang."""
_CHECKPOINT = "newest-checkpoint"
"""File with the newest checkpoint at the time of a hang."""
_COUNT, _FOLDER = "megappo/parts-done", "megappo/hang-folder"
GENERATING = ("rollout", "evaluate")
"""Phases that wait for tokens of an engine. With rollouts one step ahead, any phase may end in such a wait."""


@dataclass(frozen=True)
class Limits:
    """Limits of the duration of phases, in seconds."""

    default_seconds: float
    of_phases: Mapping[str, float] = field(default_factory=dict)
    """Limits of phases that differ from the default, in seconds."""
    generating: Collection[str] = GENERATING
    """Phases that wait for tokens of an engine."""

    def of(self, phase: str) -> float:
        """Return the limit of a phase."""
        return self.of_phases.get(phase, self.default_seconds)


class Watchdog:
    """Supervision of the phases of this rank by a separate thread.

    A phase that exceeds its limit is a failure of all ranks with exit code 79. Every rank writes its phase, the
    condition that it waits for, and all Python stacks to `<directory>/hang-<time>/rank-00000.txt`. The files thus show
    the hanging rank and the waiting ranks at the same moment.

    A phase does not exceed its limit while any rank completes parts of the phase, such as a microbatch or a bucket of
    weights (see `StageProgress.parts`). Each part resets the timer. In phases that generate, new tokens of any engine
    also reset the timer. Ranks count their progress in the common store.
    """

    def __init__(
        self, directory: Path, limits: Limits, runtime: Runtime, newest_checkpoint: Callable[[], str] = lambda: ""
    ) -> None:
        """`newest_checkpoint` returns the checkpoint from which a restarted run would continue.

        This function uses no collective, because ranks could wait for a hanging rank before the watchdog starts.
        """
        self._limits, self._runtime, self._newest_checkpoint = limits, runtime, newest_checkpoint
        self._directory = directory
        self._folder = directory / f"hang-{runtime.notices.post(_FOLDER, time.strftime('%Y%m%d-%H%M%S'))}"
        self._phase, self._waits_for, self._since = "start", "", time.monotonic()
        self._notices = runtime.notices
        self._counted, self._seen, self._looked = -math.inf, 0, False
        self._parts = PROGRESS.parts
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start watching."""
        self._arm()
        self._runtime.failures.before_leaving(self._report)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def enter(self, phase: str, waits_for: str = "") -> None:
        """Begin a phase, which lasts until the next call. `waits_for` describes the condition that the phase waits
        for."""
        self._phase, self._waits_for, self._since, self._looked = phase, waits_for, time.monotonic(), False
        self._arm()

    def made_tokens(self) -> None:
        """Record progress of the engine of this rank. Any thread may call this method at any rate."""
        if self._phase in self._limits.generating:
            self._note_progress()

    def _note_progress(self) -> None:
        self._since = now = time.monotonic()
        if now - self._counted >= _COUNT_SECONDS:
            self._counted = now
            self._arm()
            with contextlib.suppress(dist.DistError):  # the store is gone, and the run ends anyway
                self._notices.count(_COUNT, 1)

    def _any_rank_progressed(self) -> bool:
        """Return whether any rank has made progress since the last call."""
        before = self._seen
        with contextlib.suppress(dist.DistError):
            self._seen = self._notices.count(_COUNT)
        return self._seen != before

    @property
    def _limit(self) -> float:
        return self._limits.of(self._phase)

    def _arm(self) -> None:
        # This timer does not need the interpreter. The thread cannot run while a call into C holds the interpreter
        # lock.
        if not self._stopped.is_set():
            faulthandler.dump_traceback_later(self._limit + _BLOCKED_SECONDS, file=_STDERR, exit=True)

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            if (parts := PROGRESS.parts) != self._parts:
                self._parts = parts
                self._note_progress()
            seconds = time.monotonic() - self._since
            if not self._looked and seconds > _COUNT_SECONDS:  # ignores progress before this time
                self._looked = True
                self._any_rank_progressed()
            if seconds > self._limit and self._any_rank_progressed():
                self._since = time.monotonic()
                self._arm()
            elif seconds > self._limit:
                sentence, before = self._sentence(seconds), self._last_hang_at_this_checkpoint()
                if before is not None:
                    sentence += (
                        f"; the run hung before ({before}) with the same newest checkpoint, so a new start needs a "
                        "remedy first; remove the folder of the earlier hang to try again"
                    )
                code = HANG if before is None else RUN_ERROR
                self._runtime.failures.declare(Failure(self._runtime.rank, code, (sentence,), hung_in=self._phase))
                return

    def _last_hang_at_this_checkpoint(self) -> Path | None:
        """Return the folder of an earlier hang with the same newest checkpoint, or None. If the disk does not respond
        in time, the function returns None."""
        folders: list[Path] = []

        def look() -> None:
            hangs = self._directory.glob(f"hang-*/{_CHECKPOINT}")
            last = max((path for path in hangs if path.parent != self._folder), default=None)
            if last is not None and last.read_text(encoding="utf-8") == self._newest_checkpoint():
                folders.append(last.parent)

        work_within(_DISK_SECONDS, look)
        return folders[0] if folders else None

    def _sentence(self, seconds: float) -> str:
        waits = f" (this rank waits for {self._waits_for})" if self._waits_for else ""
        return (
            f"phase {self._phase} has lasted for {seconds:.0f} seconds{waits}, above the limit of {self._limit:.0f}; "
            f"the stacks of all ranks are in {self._folder}; if no rank hangs, increase "
            f"runtime.phase_timeouts_seconds.{self._phase}"
        )

    def _report(self, failure: Failure) -> None:
        """Write the stacks of this rank if a rank hangs."""
        if not failure.hung_in:
            return
        rank, seconds = self._runtime.rank, time.monotonic() - self._since
        self._folder.mkdir(parents=True, exist_ok=True)
        if rank == failure.rank:
            (self._folder / _CHECKPOINT).write_text(self._newest_checkpoint(), encoding="utf-8")
        partial = self._folder / f"rank-{rank:05d}.partial"
        with partial.open("w", encoding="utf-8") as file:
            file.write(
                f"rank {rank}, process {os.getpid()} on {socket.gethostname()}\n"
                f"phase {self._phase} for {seconds:.0f} seconds, limit {self._limit:.0f}\n"
                f"waits for: {self._waits_for or 'nothing outside of this job'}\n\n"
            )
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        partial.rename(partial.with_suffix(".txt"))


@contextlib.contextmanager
def watched(watchdog: Watchdog | None) -> Iterator[Watchdog | None]:
    """Run the watchdog while the block runs."""
    if watchdog is None:
        yield None
        return
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.stop()
