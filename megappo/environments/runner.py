"""Plays the episodes of a rank, all at the same time, in one event loop of the main thread.

The engine decides how turns are asked for: over a `Line`, on which each is answered as soon as it can be, or in rounds,
in which every episode that is not over wants one. Rounds have the same requests whenever a run is repeated.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

from megappo.engines.protocol import Completion, ConversingEngine, Engine, GenerateRequest, Line, SamplingParams
from megappo.environments.protocol import LimitReached, NonsenseError
from megappo.environments.registry import Stage
from megappo.environments.session import Session
from megappo.errors import RunError, reason
from megappo.observe.progress import PROGRESS
from megappo.runtime.interrupts import Stop
from megappo.runtime.objects import of_all_ranks
from megappo.types import Prompt

Failure = Literal["", "raised", "hung", "nonsense"]

EPISODES = "episodes of this rank"
_TICK_SECONDS = 0.1
_AGAIN_SECONDS = 1.0


class BlockedLoopError(BaseException):
    """Raised within an environment that has not let others go on for longer than an episode may take at all."""


class TooManyFailuresError(RunError):
    """More than `rollout.environment.max_failure_fraction` of a step's episodes failed."""


@dataclass
class _Playing:
    """An episode that goes on."""

    session: Session
    task: asyncio.Task[None] | None = None
    wanted: GenerateRequest | None = None
    """The turn that it waits for."""
    answer: asyncio.Future[Completion] | None = None


@dataclass
class _Table:
    """The episodes of one call of `EpisodeRunner.generate`; a `Talk`."""

    runner: EpisodeRunner
    params: SamplingParams
    done: MutableMapping[int, Completion]
    playing: dict[int, _Playing] = field(default_factory=dict)
    line: Line | None = None
    error: BaseException | None = None
    """What ends the run: no episode's fault."""

    @property
    def _most_seconds(self) -> float:
        return self.runner.shared.limits.max_seconds

    def begin(self, prompts: Sequence[Prompt], requests: Sequence[GenerateRequest]) -> None:
        """Let all episodes begin; nothing happens before the loop runs."""
        for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            if number not in self.done:
                session = Session(prompt, request, self.runner.shared, self.params, self._asker(number))
                self.playing[number] = playing = _Playing(session)
                playing.task = self.runner.loop.create_task(self._play(number, session))

    def _asker(self, number: int) -> Callable[[GenerateRequest], Any]:
        async def ask(request: GenerateRequest) -> Completion:
            playing = self.playing[number]
            playing.wanted, playing.answer = request, self.runner.loop.create_future()
            if self.line is not None and not self.line.is_over:
                self.line.send(number, request)
            self.runner.changed.set()
            return await playing.answer

        return ask

    async def _play(self, number: int, session: Session) -> None:
        failure: Failure = ""
        told, limit = "", ""
        try:
            session.finish(await self.runner.environment.run(session))
        except LimitReached as reached:
            limit = reached.limit
            if not session.turns:
                failure, told = "nonsense", f"reached its limit of {limit} before the model's first turn"
        except RunError as error:
            self.error = error
        except NonsenseError as error:
            failure, told = "nonsense", str(error)
        except (asyncio.CancelledError, BlockedLoopError):
            failure, told = "hung", f"took more than {self._most_seconds:g} seconds"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what an environment raises is a failed sample
            failure, told = "raised", f"{type(error).__name__}: {reason(error)}"
        self.end(number, failure, told, limit)

    def end(self, number: int, failure: Failure, told: str, limit: str = "") -> None:
        """Take note of how an episode ended, the first time it does."""
        if (playing := self.playing.pop(number, None)) is None:
            return
        version = self.runner.engine.version
        self.done[number] = playing.session.completion(failure=failure, reason=told, limit=limit, version=version)
        PROGRESS.add(EPISODES, 1)
        self.runner.changed.set()

    def answered(self, number: int, completion: Completion) -> None:
        """See `Talk.answered`."""
        self.runner.loop.call_soon_threadsafe(self._take, number, completion)

    def _take(self, number: int, completion: Completion) -> None:
        playing = self.playing.get(number)  # an episode that hung may be gone
        if playing is not None and playing.answer is not None and not playing.answer.done():
            playing.answer.set_result(completion)
            playing.wanted = None

    @property
    def wanted(self) -> dict[int, GenerateRequest]:
        """What waits for an answer, by the numbers of episodes."""
        return {number: p.wanted for number, p in sorted(self.playing.items()) if p.wanted is not None}

    def drive(self, line: Line) -> int:
        """See `Talk.drive`."""
        self.line = line
        for number, request in self.wanted.items():
            line.send(number, request)
        try:
            self.runner.run_until(self, lambda: line.is_over)
        finally:
            self.line = None
        return len(self.wanted)

    def round(self) -> dict[int, GenerateRequest]:
        """Let all episodes go on until each waits for the engine or is over: what they want then."""
        self.runner.run_until(self, lambda: all(p.wanted is not None for p in self.playing.values()))
        return self.wanted

    def count_seconds(self, seconds: float) -> None:
        """So long has everything gone on; who waits for engine or tools is not charged. Ends what takes too long."""
        most = self._most_seconds
        for number, playing in list(self.playing.items()):
            if not playing.session.waits:
                playing.session.spent_seconds += seconds
                if playing.session.spent_seconds > most and playing.task is not None:
                    playing.task.cancel()
                    self.end(number, "hung", f"took more than {most:g} seconds")

    def leave(self) -> None:
        """Give up what is left."""
        for playing in self.playing.values():
            playing.session.is_over = True
            if playing.task is not None:
                playing.task.cancel()
        self.playing = {}


class EpisodeRunner:
    """Answers prompts by episodes, in the place of an engine; every rank calls `generate` at the same time."""

    def __init__(self, stage: Stage, engine: Engine, stop: Stop) -> None:
        self.environment, self.shared, self.engine, self._stop = stage.environment, stage.shared, engine, stop
        self.loop = asyncio.new_event_loop()
        self.changed = asyncio.Event()
        """An episode has ended, or waits for the engine."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        """See `Engine.generate`: one sample for each request, `max_new_tokens` being of all that follows its prompt.

        Raises TooManyFailuresError on every rank where too many episodes failed over all of them.
        """
        table = _Table(self, params, done if done is not None else {})
        PROGRESS.expect(EPISODES, len(requests))
        table.begin(prompts, requests)
        try:
            if isinstance(self.engine, ConversingEngine):
                self.engine.converse(table, params)
            else:
                self._play_in_rounds(table, params)
        finally:
            table.leave()
        completions = [table.done[i] for i in range(len(requests))]
        self._check_failures(completions, str(table.error or ""))
        return completions

    def _play_in_rounds(self, table: _Table, params: SamplingParams) -> None:
        while True:
            wanted = table.round()
            facts = of_all_ranks((len(wanted), self._stop.asked))
            if any(asked for _, asked in facts):
                self._stop.check()
            if not any(count for count, _ in facts):
                return
            answers = self.engine.generate(list(wanted.values()), params)
            for number, answer in zip(wanted, answers, strict=True):
                table.answered(number, answer)

    def _check_failures(self, completions: Sequence[Completion], error: str) -> None:
        failed = [c.episode for c in completions if c.episode is not None and c.episode.failure]
        first = f"{failed[0].failure}: {failed[0].reason}" if failed else ""
        facts = of_all_ranks((len(failed), len(completions), first, error))
        errors = [of_rank for _, _, _, of_rank in facts if of_rank]
        if errors:
            raise RunError(errors[0])
        count, total = sum(fact[0] for fact in facts), sum(fact[1] for fact in facts)
        most = self.shared.limits.max_failure_fraction
        if count > most * total:
            first = next(first for _, _, first, _ in facts if first)
            raise TooManyFailuresError(
                f"{count} of {total} episodes failed, more than rollout.environment.max_failure_fraction {most:g}; "
                f"fix the environment; the first: {first}"
            )

    def run_until(self, table: _Table, holds: Callable[[], bool]) -> None:
        """Let episodes go on until something holds, all are over or the run is asked to stop."""
        with _Alarm(self.loop, table, self.shared.limits.max_seconds) as alarm:
            self.loop.run_until_complete(self._turn_around(table, holds, alarm))

    async def _turn_around(self, table: _Table, holds: Callable[[], bool], alarm: _Alarm) -> None:
        last = time.monotonic()
        alarm.set()
        await asyncio.sleep(0)
        while table.playing and not holds() and not self._stop.asked:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), _TICK_SECONDS)
            self.changed.clear()
            if (passed := time.monotonic() - last) >= _TICK_SECONDS:
                last += passed
                alarm.set()
                table.count_seconds(min(passed, _TICK_SECONDS))  # one that blocks the loop costs others nothing

    def close(self) -> None:
        """End tools, the gateway and the loop, and what episodes that hang have left in it."""
        self.shared.tools.close()
        self.loop.run_until_complete(self.shared.gateway.close())
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.wait(left, timeout=_AGAIN_SECONDS) if left else asyncio.sleep(0))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


class _Alarm:
    """Interrupts an environment whose own code lets nothing else run, such as an endless loop or a long sleep. Python
    runs handlers of signals in the main thread alone; elsewhere there is no alarm."""

    def __init__(self, loop: asyncio.AbstractEventLoop, table: _Table, seconds: float) -> None:
        self._loop, self._table, self._seconds = loop, table, seconds
        self._works = threading.current_thread() is threading.main_thread()
        self._before: Any = None

    def __enter__(self) -> _Alarm:
        if self._works:
            self._before = signal.signal(signal.SIGALRM, self._ring)
        return self

    def set(self) -> None:
        """It rings unless it is set again in time."""
        if self._works:
            signal.setitimer(signal.ITIMER_REAL, self._seconds, _AGAIN_SECONDS)

    def _ring(self, _number: int, _frame: FrameType | None) -> None:
        task = asyncio.current_task(self._loop)
        if any(playing.task is task for playing in self._table.playing.values()):
            raise BlockedLoopError

    def __exit__(self, *_exc: object) -> None:
        if self._works:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)
