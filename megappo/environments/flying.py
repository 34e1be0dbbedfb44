"""Episodes in flight over several weight syncs.

A sync interrupts turns. The turns continue under the new weights while the environments wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megappo.engines.protocol import Completion, GenerateRequest, InFlightConversingEngine, SamplingParams
from megappo.environments.table import EpisodeStart, Table
from megappo.types import Prompt


@dataclass(eq=False)
class _InFlightStream:
    """A `RequestStream` to an engine that accepts requests from any thread."""

    engine: InFlightConversingEngine
    params: SamplingParams
    is_over = False

    def send(self, number: int, request: GenerateRequest) -> None:
        """See `RequestStream.send`."""
        self.engine.send({number: request}, self.params)


class FlyingEpisodes:
    """Answers prompts with episodes, like an `InFlightEngine` with responses. Episodes continue across weight syncs."""

    def __init__(self, table: Table, engine: InFlightConversingEngine, params: SamplingParams) -> None:
        self.table, self._engine, self._params = table, engine, params
        self._halted = True
        engine.listen(table)

    def begin(self, prompts: Mapping[int, Prompt], requests: Mapping[int, GenerateRequest]) -> None:
        """Start episodes."""
        if self._halted:
            self.go_on()
        self.table.begin([EpisodeStart(number, prompts[number], request) for number, request in requests.items()])

    def go_on(self) -> None:
        """Send turns to the engine with its current weights."""
        if self._halted:
            self.table.use(_InFlightStream(self._engine, self._params))
            self._halted = False

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        """See `InFlightEngine.finished`. Every rank must call this method."""
        self.table.answer(self._engine.finished(0.0))
        self.table.resume()
        return self.table.take_done(wait_seconds)

    def abort(self) -> dict[int, Completion]:
        """Interrupt all turns like `InFlightEngine.abort`, and return the finished episodes. Other episodes
        continue."""
        self._halted = True
        self.table.halt()
        self.table.answer(self._engine.abort())
        return self.table.take_done(0.0)
