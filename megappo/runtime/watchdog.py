"""Ends a run that hangs, and leaves behind where every rank was."""

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
from megappo.observe.progress import PROGRESS
from megappo.runtime.failures import Failure, work_within
from megappo.runtime.process import Runtime

_POLL_SECONDS = 0.5
_BLOCKED_SECONDS = 60.0
"""The interpreter-independent timer ends the process this much later, so that the thread can report first."""
_STDERR = 2
_TELL_SECONDS = 1.0
"""Shortest interval between two counts of progress, each of which is a request to the store."""
_DISK_SECONDS = 10.0
"""Limit of a look at the run directory, whose disk may be what hangs."""
_CHECKPOINT = "newest-checkpoint"
"""File that names the newest checkpoint at the time of a hang."""
_COUNT, _FOLDER = "megappo/parts-done", "megappo/hang-folder"
GENERATING = ("rollout", "evaluate")
"""Phases that wait for an engine's tokens. With rollouts one step ahead, any phase may end in such a wait."""


@dataclass(frozen=True)
class Limits:
    """How long phases may last, in seconds."""

    default_seconds: float
    of_phases: Mapping[str, float] = field(default_factory=dict)
    """Limits of phases that differ from the default, in seconds."""
    generating: Collection[str] = GENERATING
    """Phases that wait for tokens from an engine."""

    def of(self, phase: str) -> float:
        """The limit of a phase."""
        return self.of_phases.get(phase, self.default_seconds)


class Watchdog:
    """Watches this rank's phase from a thread of its own.

    A phase that lasts longer than its limit is a failure of all ranks with exit code 79. All ranks write the phase,
    what they wait for and all Python stacks to `<directory>/hang-<time>/rank-00000.txt`, so that those that wait for
    the hanging one are seen at the same moment.

    A phase does not exceed its limit while any rank completes parts of it, such as a microbatch or a bucket of weights
    (see `StageProgress.parts`): the limit counts from the last one, and in phases that generate from the last tokens
    that any rank's engine made. Ranks count such progress in the store at which they met.
    """

    def __init__(
        self, directory: Path, limits: Limits, runtime: Runtime, newest_checkpoint: Callable[[], str] = lambda: ""
    ) -> None:
        """No collective is used here: ranks could wait for a hanging one before anybody watches. `newest_checkpoint`
        names the checkpoint from which a restarted run would begin."""
        self._limits, self._runtime, self._newest_checkpoint = limits, runtime, newest_checkpoint
        self._directory = directory
        self._folder = directory / f"hang-{runtime.notices.post(_FOLDER, time.strftime('%Y%m%d-%H%M%S'))}"
        self._phase, self._waits_for, self._since = "start", "", time.monotonic()
        self._notices = runtime.notices
        self._told, self._seen, self._looked = -math.inf, 0, False
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
        """Begin a phase, which lasts until the next call. `waits_for` says what is outstanding in it."""
        self._phase, self._waits_for, self._since, self._looked = phase, waits_for, time.monotonic(), False
        self._arm()

    def made_tokens(self) -> None:
        """Note progress of this rank's engine; may be called from any thread, as often as wanted."""
        if self._phase in self._limits.generating:
            self._goes_on()

    def _goes_on(self) -> None:
        self._since = now = time.monotonic()
        if now - self._told >= _TELL_SECONDS:
            self._told = now
            self._arm()
            with contextlib.suppress(dist.DistError):  # the store's holder is gone, and so is the run
                self._notices.count(_COUNT, 1)

    def _others_go_on(self) -> bool:
        """Whether any rank has made progress since the last call."""
        before = self._seen
        with contextlib.suppress(dist.DistError):
            self._seen = self._notices.count(_COUNT)
        return self._seen != before

    @property
    def _limit(self) -> float:
        return self._limits.of(self._phase)

    def _arm(self) -> None:
        # This timer needs no interpreter: where a call into C holds the interpreter's lock, the thread below cannot
        # run.
        if not self._stopped.is_set():
            faulthandler.dump_traceback_later(self._limit + _BLOCKED_SECONDS, file=_STDERR, exit=True)

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            if (parts := PROGRESS.parts) != self._parts:
                self._parts = parts
                self._goes_on()
            seconds = time.monotonic() - self._since
            if not self._looked and seconds > _TELL_SECONDS:  # so that only progress from now on counts
                self._looked = True
                self._others_go_on()
            if seconds > self._limit and self._others_go_on():
                self._since = time.monotonic()
                self._arm()
            elif seconds > self._limit:
                words, before = self._words(seconds), self._last_hang_at_this_checkpoint()
                if before is not None:
                    words += (
                        f"; the run hung before ({before}) with the same newest checkpoint, so it is not to be started "
                        "again before that is looked into; remove that folder to try again"
                    )
                code = HANG if before is None else RUN_ERROR
                self._runtime.failures.declare(Failure(self._runtime.rank, code, (words,), hung_in=self._phase))
                return

    def _last_hang_at_this_checkpoint(self) -> Path | None:
        """Folder of an earlier hang of the run, if there is no newer checkpoint since. A disk that does not answer
        counts as no."""
        found: list[Path] = []

        def look() -> None:
            hangs = self._directory.glob(f"hang-*/{_CHECKPOINT}")
            last = max((path for path in hangs if path.parent != self._folder), default=None)
            if last is not None and last.read_text(encoding="utf-8") == self._newest_checkpoint():
                found.append(last.parent)

        work_within(_DISK_SECONDS, look)
        return found[0] if found else None

    def _words(self, seconds: float) -> str:
        waits = f" (this rank waits for {self._waits_for})" if self._waits_for else ""
        return (
            f"phase {self._phase} has lasted for {seconds:.0f} seconds{waits}, above the limit of {self._limit:.0f}; "
            f"the stacks of all ranks are in {self._folder}; if nothing hangs there, raise "
            f"runtime.phase_timeouts_seconds.{self._phase}"
        )

    def _report(self, failure: Failure) -> None:
        """Write this rank's stacks where a rank hangs."""
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
    """Watch while the block runs."""
    if watchdog is None:
        yield None
        return
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.stop()
