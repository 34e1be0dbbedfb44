"""An engine that generates during the updates with a simulated clock, so runs with this engine are repeatable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megappo.engines.protocol import Completion, GenerateRequest, PauseMode, SamplingParams, SyncReport
from megappo.reshard.stream import WeightStream
from megappo.runtime.process import Runtime
from tests.support.embedded import AroundEmbedded


@dataclass(eq=False)
class _Running:
    request: GenerateRequest
    params: SamplingParams
    began: int
    future: Future[Completion] = field(default_factory=Future)
    answer: Completion | None = None


class TickingEngine(AroundEmbedded):
    """The embedded engine computes an answer at once, and delivers one token per tick, or one token per five ticks
    for one in `slow_every` prompts. The clock ticks at each poll with unanswered requests, and `ticks_in_step` times
    before an abort. Greedy requests, which are those of evaluations, take no time.

    `log`: prefix of a file per rank with the seed of each sampled request that is answered completely.
    """

    def __init__(
        self, *, runtime: Runtime, ticks_in_step: int = 6, slow_every: int = 3, log: str = "", **options: Any
    ) -> None:
        super().__init__(runtime=runtime, **options)
        self._ticks_in_step, self._slow_every = ticks_in_step, slow_every
        self._log = Path(f"{log}-{runtime.rank}") if log else None
        self._now = 0
        self._running: list[_Running] = []
        self._lock = threading.Lock()

    def update_weights(self, named_tensors: WeightStream, version: int) -> SyncReport:
        assert not self._running, "requests are under way while weights change"
        return super().update_weights(named_tensors, version)

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        with self._lock:
            new = [_Running(request, params, self._now) for request in requests]
            self._running += new
        return [each.future for each in new]

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        self.stop.check()
        greedy = self._take(lambda each: each.params.greedy)
        if not greedy:
            self._now += bool(self._running)
        self._deliver(greedy or self._take())

    def pause(self, mode: PauseMode) -> None:
        assert mode == "abort"
        self._now += self._ticks_in_step
        self._deliver(self._take(), aborts=True)

    def _take(self, is_taken: Callable[[_Running], bool] = lambda _: True) -> list[_Running]:
        with self._lock:
            taken = [each for each in self._running if is_taken(each)]
            self._running = [each for each in self._running if not is_taken(each)]
        return taken

    def _deliver(self, running: Sequence[_Running], *, aborts: bool = False) -> None:
        """Answer the requests whose tokens are all delivered. With `aborts`, answer the others with their tokens so
        far."""
        new = [each for each in running if each.answer is None]
        for params, of_params in groupby(new, key=lambda each: each.params):
            batch = list(of_params)
            for each, whole in zip(batch, self.complete([e.request for e in batch], params), strict=True):
                each.answer = whole
        for each in running:
            answer = each.answer
            assert answer is not None
            tokens = self._delivered_tokens(each, len(answer.token_ids))
            if tokens == len(answer.token_ids):
                self._write(each)
                each.future.set_result(answer)
            elif aborts:
                ids, logprobs = answer.token_ids[:tokens], answer.logprobs[:tokens]
                partial = replace(answer, token_ids=ids, logprobs=logprobs, truncated=False, broken_off=True)
                each.future.set_result(partial)
            else:
                with self._lock:
                    self._running.append(each)

    def _delivered_tokens(self, running: _Running, length: int) -> int:
        """Return the number of delivered tokens of an answer with `length` tokens."""
        ticks = 1 if running.request.prompt_id % self._slow_every else 5
        return length if running.params.greedy else min(length, (self._now - running.began) // ticks)

    def _write(self, running: _Running) -> None:
        if self._log is not None and not running.params.greedy:
            with self._log.open("a") as log:
                print(running.request.seed, file=log)
