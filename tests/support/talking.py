"""An engine for conversations during the updates. Requests are processed one at a time, so runs with this engine are
repeatable."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from megappo.engines.protocol import Completion, GenerateRequest, PauseMode, SamplingParams
from tests.support.embedded import AroundEmbedded


class _Queued(NamedTuple):
    request: GenerateRequest
    params: SamplingParams
    future: Future[Completion]


class TalkingEngine(AroundEmbedded):
    """The embedded engine in a separate thread, without collectives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._failures = options["runtime"].failures
        self._queue: deque[_Queued] = deque()
        self._thread: threading.Thread | None = None
        """Thread that answers the queue. None if the queue is empty."""
        self._news = threading.Condition()

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        queued = [_Queued(request, params, Future()) for request in requests]
        with self._news:
            self._queue += queued
            if queued and self._thread is None:
                self._thread = threading.Thread(target=self._answer, daemon=True)
                self._thread.start()
        return [each.future for each in queued]

    def _answer(self) -> None:
        with self._failures.reporting():  # otherwise all ranks would wait for an answer
            while (item := self._next()) is not None:
                [completion] = self.complete([item.request], item.params)
                item.future.set_result(completion)

    def _next(self) -> _Queued | None:
        with self._news:
            if self._queue:
                return self._queue.popleft()
            self._thread = None
            self._news.notify_all()
            return None

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        with self._news:
            self._news.wait_for(lambda: self._thread is None or self.stop.requested, wait_seconds)
        self.stop.check()

    def pause(self, mode: PauseMode) -> None:
        """Finish the request that is being computed. Return the others without tokens."""
        assert mode == "abort"
        with self._news:
            queued, thread = [*self._queue], self._thread
            self._queue.clear()
        if thread is not None:
            thread.join()
        for each in queued:
            each.future.set_result(Completion((), (), False, self.version, broken_off=True))

    def close(self) -> None:
        self.pause("abort")
        super().close()
