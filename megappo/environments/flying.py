"""Episodes in flight over several weight syncs: a sync breaks their turns off, which continue under the new weights
while the environments wait."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megappo.engines.protocol import Completion, GenerateRequest, InFlightConversingEngine, SamplingParams
from megappo.environments.table import EpisodeStart, Table
from megappo.types import Prompt


@dataclass(eq=False)
class _InFlightStream:
    """A `RequestStream` to an engine that takes requests from any thread."""

    engine: InFlightConversingEngine
    params: SamplingParams
    is_over = False

    def send(self, number: int, request: GenerateRequest) -> None:
        """See `RequestStream.send`."""
        self.engine.send({number: request}, self.params)


class FlyingEpisodes:
    """Answers prompts with episodes as an `InFlightEngine` does with responses; each is under way until it is over."""

    def __init__(self, table: Table, engine: InFlightConversingEngine, params: SamplingParams) -> None:
        self._table, self._engine, self._params = table, engine, params
        self._halted = True
        engine.listen(table)

    def begin(self, prompts: Mapping[int, Prompt], requests: Mapping[int, GenerateRequest]) -> None:
        """Begin episodes."""
        if self._halted:
            self.go_on()
        self._table.begin([EpisodeStart(number, prompts[number], request) for number, request in requests.items()])

    def go_on(self) -> None:
        """Send turns to the engine from now on, with its current weights."""
        if self._halted:
            self._table.use(_InFlightStream(self._engine, self._params))
            self._halted = False

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        """See `InFlightEngine.finished`; every rank calls it."""
        self._table.answer(self._engine.finished(0.0))
        self._table.resume()
        return self._table.take_done(wait_seconds)

    def abort(self) -> dict[int, Completion]:
        """Break off all turns as `InFlightEngine.abort` does; returns the episodes that are over. Others stay under
        way."""
        self._halted = True
        self._table.halt()
        self._table.answer(self._engine.abort())
        return self._table.take_done(0.0)

    def give_up(self, numbers: Collection[int]) -> None:
        """Drop these episodes; none of their turns is under way in the engine."""
        self._table.give_up(numbers)

    def begun(self) -> int:
        """Number of episodes under way in which the model has made tokens."""
        return self._table.begun()

    @property
    def error(self) -> str:
        """Error that ends the run and is no episode's fault; "" where there is none."""
        return str(self._table.error or "")
