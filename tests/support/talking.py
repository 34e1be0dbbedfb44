"""An engine for conversations during the updates. Requests are processed one at a time, so runs with this engine are
repeatable."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

from megappo.engines.protocol import Completion, GenerateRequest, Listener, RequestStream, SamplingParams, TurnDriver
from megappo.engines.transformers_engine import TransformersEngine
from megappo.runtime.failures import Failures
from megappo.runtime.objects import all_gather_objects
from tests.support.embedded import AroundEmbedded


class TalkingEngine(AroundEmbedded):
    """The embedded engine in a separate thread, without collectives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._listener: Listener | None = None
        self._line: _OneByOne | None = None
        self._failures = options["runtime"].failures
        self._lock = threading.Lock()

    def converse(self, talk: TurnDriver, params: SamplingParams) -> None:
        self.finish_stream(talk, self.open_stream(talk, params), params)

    def open_stream(self, talk: TurnDriver, params: SamplingParams) -> RequestStream:
        return _OneByOne(self.inner, talk, params, self._failures)

    def finish_stream(
        self, talk: TurnDriver, line: RequestStream, params: SamplingParams, *, weights_changed: bool = False
    ) -> None:
        assert isinstance(line, _OneByOne)
        try:
            left = talk.drive(line)
        finally:
            line.close()
        self.stop.check()
        assert not any(all_gather_objects(left))

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    def send(self, requests: Mapping[int, GenerateRequest], params: SamplingParams) -> None:
        with self._lock:
            if self._line is None:
                assert self._listener is not None
                self._line = _OneByOne(self.inner, self._listener, params, self._failures)
            for number, request in requests.items():
                self._line.send(number, request)

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        self.stop.check()
        return {}

    def abort(self) -> dict[int, Completion]:
        line, self._line = self._line, None
        if line is not None:
            line.close()
        nothing = Completion((), (), truncated=False, weight_version=self.version, broken_off=True)
        return {} if line is None else dict.fromkeys(line.pending, nothing)

    def close(self) -> None:
        self.abort()
        super().close()


class _OneByOne(RequestStream):
    is_over = False

    def __init__(self, inner: TransformersEngine, talk: Listener, params: SamplingParams, failures: Failures) -> None:
        self._inner, self._talk, self._params, self._failures = inner, talk, params, failures
        self._requests: queue.SimpleQueue[tuple[int, GenerateRequest] | None] = queue.SimpleQueue()
        self._closed = False
        self.pending: set[int] = set()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def send(self, number: int, request: GenerateRequest) -> None:
        self.pending.add(number)
        self._requests.put((number, request))

    def _answer(self) -> None:
        with self._failures.reporting():  # otherwise all ranks would wait for an answer
            self._answer_all()

    def _answer_all(self) -> None:
        while (item := self._requests.get()) is not None and not self._closed:
            number, request = item
            [completion] = self._inner.generate([request], self._params)
            self.pending.discard(number)
            self._talk.answered(number, completion)

    def close(self) -> None:
        self._closed = True
        self._requests.put(None)
        self._thread.join()
