"""Runs the episodes of a rank concurrently, while the trainer waits for them or computes.

The engine determines how turns are requested. A `RequestStream` answers each turn as soon as possible. Rounds contain
one turn of every unfinished episode, and have the same requests whenever a run is repeated. The thread of the
episodes runs no collectives, because ranks would call them in different orders and hang.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from megappo.engines.protocol import (
    Completion,
    ConversingAheadEngine,
    ConversingEngine,
    Engine,
    GenerateRequest,
    InFlightConversingEngine,
    RequestStream,
    SamplingParams,
)
from megappo.environments.flying import FlyingEpisodes
from megappo.environments.loop import Owner, WatchedLoop
from megappo.environments.registry import EnvironmentContext
from megappo.environments.table import EpisodePool, EpisodeStart, Table
from megappo.errors import RunError
from megappo.observe.progress import EPISODES, PROGRESS
from megappo.runtime.interrupts import Stop
from megappo.runtime.objects import all_gather_objects
from megappo.types import Prompt


class TooManyFailuresError(RunError):
    """More than `rollout.environment.max_failure_fraction` of the episodes of a step failed."""


@dataclass
class PendingEpisodes:
    """Handle of running episodes."""

    table: Table
    stream: RequestStream
    params: SamplingParams
    completions: dict[int, Completion]
    """Samples of finished episodes by number."""
    count: int


class EpisodeRunner:
    """Answers prompts with episodes instead of engine responses.

    Every rank must call `generate` and `collect` at the same time.
    """

    def __init__(self, stage: EnvironmentContext, engine: Engine, stop: Stop) -> None:
        self._engine, self._stop, self._limits = engine, stop, stage.shared.limits
        self._tables: list[Table] = []
        loop = WatchedLoop(self._limits.max_seconds, self._count_seconds, self._begin_again)
        self._pool = EpisodePool(stage, loop, engine, stop)

    def generate(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        """See `Engine.generate`. Returns one sample per request. `max_new_tokens` limits all tokens after the prompt.

        Raises TooManyFailuresError on every rank if too many episodes of all ranks failed.
        """
        table = self._begin(prompts, requests, params, done if done is not None else {})
        try:
            if isinstance(self._engine, ConversingEngine):
                self._engine.converse(table, params)
            else:
                self._play_in_rounds(table, params)
        finally:
            self._leave(table)
        return self._checked(table, len(requests))

    def submit(
        self, prompts: Sequence[Prompt], requests: Sequence[GenerateRequest], params: SamplingParams
    ) -> PendingEpisodes:
        """Start episodes and return immediately. `collect` returns the samples. Not a collective."""
        assert isinstance(self._engine, ConversingAheadEngine), "validated: other engines do not support rollout.ahead"
        done = dict[int, Completion]()
        table = self._begin(prompts, requests, params, done)
        stream = self._engine.open_stream(table, params)
        table.use(stream)
        return PendingEpisodes(table, stream, params, done, len(requests))

    def collect(self, pending: PendingEpisodes, *, weights_changed: bool = False) -> list[Completion]:
        """Return the samples in order, like `AheadEngine.collect`. Raises like `generate`."""
        assert isinstance(self._engine, ConversingAheadEngine)
        try:
            self._engine.finish_stream(pending.table, pending.stream, pending.params, weights_changed=weights_changed)
        finally:
            self._leave(pending.table)
        return self._checked(pending.table, pending.count)

    def fly(self, params: SamplingParams) -> FlyingEpisodes:
        """Create the episodes in flight of a run with `rollout.ahead` of 2 or more."""
        assert isinstance(self._engine, InFlightConversingEngine), (
            "validated: other engines do not support rollout.ahead"
        )
        self._tables.append(table := Table(self._pool, params))
        return FlyingEpisodes(table, self._engine, params)

    def _begin(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion],
    ) -> Table:
        table = Table(self._pool, params, done)
        self._tables.append(table)
        PROGRESS.expect(EPISODES, len(requests))
        numbered = enumerate(zip(prompts, requests, strict=True))
        table.begin([EpisodeStart(i, prompt, request) for i, (prompt, request) in numbered if i not in done])
        return table

    def _leave(self, table: Table) -> None:
        table.leave()
        self._tables.remove(table)

    def _play_in_rounds(self, table: Table, params: SamplingParams) -> None:
        while True:
            turn_requests = table.round()
            facts = all_gather_objects((len(turn_requests), self._stop.requested))
            if any(is_stopped for _, is_stopped in facts):
                self._stop.check()
            if not any(count for count, _ in facts):
                return
            table.answer(
                dict(zip(turn_requests, self._engine.generate(list(turn_requests.values()), params), strict=True))
            )

    def _checked(self, table: Table, count: int) -> list[Completion]:
        completions = [table.done[i] for i in range(count)]
        self.check_failures(completions, table.error)
        return completions

    def check_failures(self, completions: Sequence[Completion], error: BaseException | None) -> None:
        """Raise on every rank if any rank has an error, or if too many episodes of all ranks failed. A collective.

        Raises RunError and TooManyFailuresError.
        """
        failed = [c.episode for c in completions if c.episode is not None and c.episode.failure]
        first = f"{failed[0].failure}: {failed[0].reason}" if failed else ""
        facts = all_gather_objects((len(failed), len(completions), first, str(error or "")))
        errors = [of_rank for _, _, _, of_rank in facts if of_rank]
        if errors:
            raise RunError(errors[0])
        count, total = sum(fact[0] for fact in facts), sum(fact[1] for fact in facts)
        most = self._limits.max_failure_fraction
        if count > most * total:
            first = next(first for _, _, first, _ in facts if first)
            raise TooManyFailuresError(
                f"{count} of {total} episodes failed, more than rollout.environment.max_failure_fraction {most:g}; "
                f"fix the environment; the first: {first}"
            )

    # Called by the loop and its watch

    def _count_seconds(self, seconds: float) -> None:
        for table in list(self._tables):
            table.count_seconds(seconds)

    def _begin_again(self, blocking: Owner) -> None:
        before, self._pool.stage = self._pool.stage, self._pool.stage.again()
        for table in list(self._tables):
            table.begin_again(blocking)
        before.shared.tools.close()

    def close(self) -> None:
        """Close the tools, the gateway and the loop, including the remains of hanging episodes."""
        for table in list(self._tables):
            self._leave(table)
        shared = self._pool.stage.shared
        shared.tools.close()
        self._pool.loop.close(shared.gateway.close)
