"""Plays the episodes of a rank, all at the same time, while the trainer waits for them or computes.

The engine decides how turns are requested: over a `RequestStream`, which answers each as soon as possible, or in
rounds, one turn of every unfinished episode at a time. Rounds have the same requests whenever a run is repeated. No
collective runs in the thread of the episodes: there, ranks would call them in different orders and hang.
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
from megappo.environments.table import EpisodeStart, House, Table
from megappo.errors import RunError
from megappo.observe.progress import EPISODES, PROGRESS
from megappo.runtime.interrupts import Stop
from megappo.runtime.objects import all_gather_objects
from megappo.types import Prompt


class TooManyFailuresError(RunError):
    """More than `rollout.environment.max_failure_fraction` of a step's episodes failed."""


@dataclass
class PendingEpisodes:
    """Handle of episodes that are being played."""

    table: Table
    stream: RequestStream
    params: SamplingParams
    completions: dict[int, Completion]
    """Samples of episodes that are over, by number."""
    count: int


class EpisodeRunner:
    """Answers prompts with episodes, in the place of an engine; every rank calls `generate` and `collect` at the same
    time."""

    def __init__(self, stage: EnvironmentContext, engine: Engine, stop: Stop) -> None:
        self._engine, self._stop, self._limits = engine, stop, stage.shared.limits
        self._tables: list[Table] = []
        loop = WatchedLoop(self._limits.max_seconds, self._count_seconds, self._begin_again)
        self._house = House(stage, loop, engine, stop)

    def generate(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        """See `Engine.generate`: one sample for each request; `max_new_tokens` limits all that follows its prompt.

        Raises TooManyFailuresError on every rank where too many episodes failed over all of them.
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
        """Begin to play and return at once; `collect` takes the samples. Not a collective."""
        assert isinstance(self._engine, ConversingAheadEngine), "rules refuse rollout.ahead with other engines"
        done = dict[int, Completion]()
        table = self._begin(prompts, requests, params, done)
        stream = self._engine.open_stream(table, params)
        table.use(stream)
        return PendingEpisodes(table, stream, params, done, len(requests))

    def collect(self, pending: PendingEpisodes, *, weights_changed: bool = False) -> list[Completion]:
        """The samples, in order, as `AheadEngine.collect`. Raises as `generate` does."""
        assert isinstance(self._engine, ConversingAheadEngine)
        try:
            self._engine.finish_stream(pending.table, pending.stream, pending.params, weights_changed=weights_changed)
        finally:
            self._leave(pending.table)
        return self._checked(pending.table, pending.count)

    def fly(self, params: SamplingParams) -> FlyingEpisodes:
        """Make the episodes in flight of a run with `rollout.ahead` of 2 or more."""
        assert isinstance(self._engine, InFlightConversingEngine), "rules refuse rollout.ahead with other engines"
        self._tables.append(table := Table(self._house, params))
        return FlyingEpisodes(table, self._engine, params)

    def _begin(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion],
    ) -> Table:
        table = Table(self._house, params, done)
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
            wanted = table.round()
            facts = all_gather_objects((len(wanted), self._stop.asked))
            if any(asked for _, asked in facts):
                self._stop.check()
            if not any(count for count, _ in facts):
                return
            table.answer(dict(zip(wanted, self._engine.generate(list(wanted.values()), params), strict=True)))

    def _checked(self, table: Table, count: int) -> list[Completion]:
        completions = [table.done[i] for i in range(count)]
        self.check_failures(completions, table.error)
        return completions

    def check_failures(self, completions: Sequence[Completion], error: BaseException | None) -> None:
        """Raise on every rank where any rank has an error, or too many episodes failed over all ranks; a collective.
        Raises RunError and TooManyFailuresError."""
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
        before, self._house.stage = self._house.stage, self._house.stage.again()
        for table in list(self._tables):
            table.begin_again(blocking)
        before.shared.tools.close()

    def close(self) -> None:
        """End tools, the gateway and the loop, with what hanging episodes have left in it."""
        for table in list(self._tables):
            self._leave(table)
        shared = self._house.stage.shared
        shared.tools.close()
        self._house.loop.close(shared.gateway.close)
