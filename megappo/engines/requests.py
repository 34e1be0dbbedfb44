"""Requests that continue under newer weights until their responses are complete."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

from megappo.engines.protocol import Completion, Engine, GenerateRequest, PauseMode, SamplingParams
from megappo.engines.stretches import continued, ended, joined, stopped
from megappo.models.tokens import without_row
from megappo.observe.terminal.progress import PROGRESS, SAMPLES
from megappo.runtime.ranks.objects import all_gather_objects

LONG_WAIT_SECONDS = 1.0
"""Interval of polls that wait for all requests of this rank."""


@dataclass(eq=False)
class TrackedRequest:
    """A request and its response so far."""

    request: GenerateRequest
    params: SamplingParams
    future: Future[Completion] = field(default_factory=Future)
    """Receives the complete response. Callbacks may run in any thread."""
    answer: Completion | None = None
    """Response so far, marked `broken_off` while incomplete. None before the first token."""


class RequestTracker:
    """Submits requests to an engine, and submits interrupted requests again with their tokens.

    Any thread may submit. `vocabulary` is the number of token ids with an embedding in every model, or None for any
    number. A response with another token id is not continued.
    """

    def __init__(self, engine: Engine, vocabulary: int | None = None) -> None:
        self._engine, self._vocabulary = engine, vocabulary
        self._interrupted: list[TrackedRequest] = []
        self._paused = False
        self._lock = threading.RLock()

    def submit(self, tracked: Sequence[TrackedRequest]) -> None:
        """Submit requests with their responses so far. Paused requests are submitted by `resume`."""
        with self._lock:
            if self._paused:
                self._interrupted += tracked
                return
        for params, group in groupby(tracked, key=lambda each: each.params):
            each_of_group = list(group)
            rest = [
                continued(t.request, t.answer, t.request.most_tokens(params), t.request.least_tokens(params))
                for t in each_of_group
            ]
            for each, answer in zip(each_of_group, self._engine.submit(rest, params), strict=True):
                answer.add_done_callback(partial(self._receive, each))

    def _receive(self, tracked: TrackedRequest, answered: Future[Completion]) -> None:
        """Store an answer of the engine. Called from any thread."""
        if answered.cancelled() or tracked.future.cancelled():
            return
        news = answered.result()
        request, params = tracked.request, tracked.params
        if news.token_ids or not news.broken_off:
            whole = stopped(joined(tracked.answer, news), params)
            tracked.answer = ended(whole, params.stop_token_ids, request.most_tokens(params))
        answer = tracked.answer
        if answer is not None and answer.broken_off and self._is_unknown(answer):
            answer = tracked.answer = replace(answer, broken_off=False)
        if answer is None or answer.broken_off:
            self.submit([tracked])
        elif tracked.future.set_running_or_notify_cancel():
            tracked.future.set_result(answer)

    def _is_unknown(self, answer: Completion) -> bool:
        return self._vocabulary is not None and without_row(answer.token_ids, self._vocabulary) is not None

    def pause(self, mode: PauseMode) -> None:
        """Pause the engine. New requests wait for `resume`. All ranks call this method."""
        if mode == "abort":
            with self._lock:
                self._paused = True
        self._engine.pause(mode)

    def resume(self) -> None:
        """Submit the interrupted and waiting requests under the current weights of the engine."""
        with self._lock:
            self._paused, interrupted = False, self._interrupted
            self._interrupted = []
        self.submit([tracked for tracked in interrupted if not tracked.future.cancelled()])


def generate(engine: Engine, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Completion]:
    """Return the completions of all requests of this rank, in order. A collective of the world.

    Raises the exceptions of `Engine.poll`.
    """
    if requests:
        PROGRESS.expect(SAMPLES, len(requests))
    futures = engine.submit(requests, params)
    while any(all_gather_objects(not all(future.done() for future in futures))):
        engine.poll(LONG_WAIT_SECONDS)
    return [future.result() for future in futures]
