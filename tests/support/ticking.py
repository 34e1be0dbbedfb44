"""An engine that generates during the updates with a simulated clock, so runs with this engine are repeatable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megappo.engines.protocol import Completion, GenerateRequest, RequestStream, SamplingParams, TurnDriver
from megappo.environments.table import Table
from megappo.reshard.stream import WeightStream
from megappo.runtime.process import Runtime
from tests.support.embedded import AroundEmbedded


@dataclass
class _UnderWay:
    request: GenerateRequest
    began: int
    answer: Completion | None = None


@dataclass
class _Submitted:
    requests: Sequence[GenerateRequest]
    params: SamplingParams
    completions: dict[int, Completion] = field(default_factory=dict)


class _NoStream(RequestStream):
    """A stream without answers. The turns wait for a round."""

    is_over = False

    def send(self, number: int, request: GenerateRequest) -> None:
        pass


class TickingEngine(AroundEmbedded):
    """The embedded engine computes an answer at once, and delivers one token per tick, or one token per five ticks
    for one in `slow_every` requests. The clock ticks at each wait, and `ticks_in_step` times before an abort."""

    def __init__(
        self, *, runtime: Runtime, ticks_in_step: int = 6, slow_every: int = 24, log: str = "", **options: Any
    ) -> None:
        super().__init__(runtime=runtime, **options)
        self._ticks_in_step, self._slow_every = ticks_in_step, slow_every
        self._log = Path(f"{log}-{runtime.rank}") if log else None
        self._now = 0
        self._under_way: dict[int, _UnderWay] = {}
        self._params: SamplingParams | None = None

    def update_weights(self, named_tensors: WeightStream, version: int) -> None:
        assert not self._under_way, "requests are under way while weights change"
        super().update_weights(named_tensors, version)

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> _Submitted:
        return _Submitted(requests, params)

    def collect(self, pending: _Submitted, *, weights_changed: bool = False) -> list[Completion]:
        answers = self.inner.generate(pending.requests, pending.params)
        pending.completions = dict(enumerate(answers))
        return answers

    def converse(self, talk: TurnDriver, params: SamplingParams) -> None:
        self.finish_stream(talk, self.open_stream(talk, params), params)

    def open_stream(self, talk: TurnDriver, params: SamplingParams) -> RequestStream:
        return _NoStream()

    def finish_stream(
        self, talk: TurnDriver, line: RequestStream, params: SamplingParams, *, weights_changed: bool = False
    ) -> None:
        assert isinstance(talk, Table)
        while requests := talk.round():
            talk.answer(dict(zip(requests, self.inner.generate(list(requests.values()), params), strict=True)))
        self.stop.check()

    def send(self, requests: Mapping[int, GenerateRequest], params: SamplingParams) -> None:
        assert not requests.keys() & self._under_way.keys()
        self._params = params
        self._under_way |= {number: _UnderWay(request, self._now) for number, request in requests.items()}

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        self.stop.check()
        self._now += wait_seconds > 0
        return self._come_out()

    def _come_out(self) -> dict[int, Completion]:
        self._compute()
        completions = {n: one.answer for n, one in self._under_way.items() if one.answer and self._tokens(n) is None}
        for number in completions:
            del self._under_way[number]
        self._write(completions)
        return completions

    def abort(self) -> dict[int, Completion]:
        self._now += self._ticks_in_step
        completions = self._come_out()
        for number, one in self._under_way.items():
            tokens = self._tokens(number)
            assert one.answer is not None and tokens is not None
            ids, logprobs = one.answer.token_ids[:tokens], one.answer.logprobs[:tokens]
            completions[number] = replace(
                one.answer, token_ids=ids, logprobs=logprobs, truncated=False, broken_off=True
            )
        self._under_way = {}
        return completions

    def _compute(self) -> None:
        new = [one for one in self._under_way.values() if one.answer is None]
        if not new:
            return
        params = self._params
        assert params is not None
        for one, answer in zip(new, self.inner.generate([one.request for one in new], params), strict=True):
            one.answer = answer

    def _tokens(self, number: int) -> int | None:
        """Return the number of delivered tokens, or None if all tokens are delivered."""
        one = self._under_way[number]
        assert one.answer is not None
        tokens = (self._now - one.began) // (5 if number % self._slow_every == 0 else 1)
        return None if tokens >= len(one.answer.token_ids) else tokens

    def _write(self, completions: Mapping[int, Completion]) -> None:
        if self._log is not None:
            with self._log.open("a") as log:
                for number, answer in completions.items():
                    line: dict[str, Any] = {"number": number, "version": answer.weight_version}
                    print(json.dumps(line), file=log)
