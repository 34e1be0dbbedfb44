"""Base classes of engines."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import NamedTuple

from megappo.config.sections.engine import EngineCapabilities
from megappo.engines.protocol import (
    Completion,
    EngineUsage,
    GenerateRequest,
    PauseMode,
    SamplingParams,
    SyncReport,
)
from megappo.errors import RunError
from megappo.reshard.stream import WeightStream
from megappo.runtime.watch.interrupts import NeverStop, Stop


class EngineBase(ABC):
    """Defaults of the optional members of `Engine`."""

    capabilities = EngineCapabilities()
    version = 0
    usage = EngineUsage()
    replicas: Sequence[int] = ()

    def __init__(self) -> None:
        self.on_tokens: Callable[[], None] = lambda: None

    @abstractmethod
    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        """See `Engine.submit`."""

    @abstractmethod
    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        """See `Engine.poll`."""

    @abstractmethod
    def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""

    @abstractmethod
    def update_weights(self, named_tensors: WeightStream, version: int) -> SyncReport:
        """See `Engine.update_weights`."""

    def sleep(self) -> None:  # noqa: B027 - optional
        """Keep the memory. See `Engine.sleep`."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release nothing. See `Engine.close`."""


class SyncError(RunError):
    """Replicas whose weights or log-probabilities differ from those of the trainer after a weight update."""


class _Queued(NamedTuple):
    request: GenerateRequest
    params: SamplingParams
    future: Future[Completion]


class BatchEngine(EngineBase):
    """An engine that generates in the thread of the trainer, while the trainer polls."""

    def __init__(self, stop: Stop | None = None) -> None:
        super().__init__()
        self._stop: Stop = stop if stop is not None else NeverStop()
        self._queue: list[_Queued] = []
        self._queue_lock = threading.Lock()

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        """Yield the completion of each request, in any order, with the index of the request.

        Returns early if `Engine.poll` must stop.
        """

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        """See `Engine.submit`. The next `poll` computes the requests."""
        queued = [_Queued(request, params, Future()) for request in requests]
        with self._queue_lock:
            self._queue += queued
        return [each.future for each in queued]

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        """See `Engine.poll`. Computes all submitted requests."""
        with self._queue_lock:
            queue, self._queue = self._queue, []
        for params, batch in groupby(queue, key=lambda each: each.params):
            queued = list(batch)
            for index, completion in self.generate([each.request for each in queued], params):
                queued[index].future.set_result(completion)
        with self._queue_lock:
            self._queue = [each for each in queue if not each.future.done()] + self._queue
        self._stop.check()  # raises on every rank if one rank has returned early

    def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. Requests that were not computed are returned without tokens."""
        with self._queue_lock:
            queue, self._queue = self._queue, []
        for each in queue:
            each.future.set_result(Completion((), (), False, self.version, broken_off=True))
