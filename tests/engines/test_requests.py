"""Tests of interrupted answers that continue under newer weights."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from megappo.engines.base import EngineBase
from megappo.engines.protocol import Completion, GenerateRequest, PauseMode, SamplingParams, SyncReport
from megappo.engines.requests import RequestTracker, TrackedRequest
from megappo.engines.stretches import continued, ended, joined, stopped, token_versions
from megappo.models.stop_texts import StopTexts
from tests.support.episodes import TOKENIZER

STOP = 1


def test_interrupted_answer_continues_from_its_tokens() -> None:
    request = GenerateRequest((7, 8), seed=5, prompt_id=0)
    begun = Completion((3, 4), (-0.1, -0.2), False, 2, broken_off=True)
    rest = continued(request, begun, 5)
    assert (rest.token_ids, rest.max_new_tokens) == ((7, 8, 3, 4), 3)
    assert len({5, rest.seed, continued(request, replace(begun, token_ids=(3,)), 5).seed}) == 3
    assert continued(request, None, 5) is request
    more = joined(begun, Completion((5,), (-0.3,), False, 3, broken_off=True))
    assert more.broken_off and more.weight_version == 2 and more.stretches == ((2, 2), (3, 1))
    again = joined(more, Completion((6,), (-0.4,), False, 3, broken_off=True))  # a server restarted in between
    whole = joined(again, Completion((9, STOP), (-0.5, -0.6), False, 4))
    assert whole.token_ids == (3, 4, 5, 6, 9, STOP) and whole.logprobs == (-0.1, -0.2, -0.3, -0.4, -0.5, -0.6)
    assert not whole.broken_off and whole.weight_version == 2
    assert token_versions(whole) == [2, 2, 3, 3, 4, 4]
    assert joined(begun, Completion((), (), False, 9, broken_off=True)) is begun
    assert joined(None, rest_of := Completion((1,), (-1.0,), False, 9)) is rest_of


def test_stop_text_can_span_an_interruption() -> None:
    """Tokens after the stop text are dropped, even if other weights generated them. The minimum length counts from the
    start of the answer."""
    tokens = tuple(TOKENIZER("hide.go", add_special_tokens=False)["input_ids"])
    request, params = GenerateRequest((7,), 5, 0), SamplingParams(1.0, 9, (), min_new_tokens=4)
    begun = Completion(tokens[:3], (-0.1, -0.2, -0.3), False, 4, broken_off=True)
    rest = continued(request, begun, 9, request.least_tokens(params))
    assert (rest.least_tokens(params), request.least_tokens(params)) == (1, 4)
    routing = torch.arange(7).view(7, 1, 1)  # for the prompt and all tokens except the last
    whole = joined(begun, Completion(tokens[3:], (-0.4, -0.5, -0.6, -0.7), True, 5, routing))
    params = replace(params, stop_texts=StopTexts(("de",), TOKENIZER))
    for answer in (whole, replace(whole, broken_off=True)):
        stopped_answer = stopped(answer, params)
        assert (stopped_answer.token_ids, stopped_answer.logprobs) == (tokens[:4], (-0.1, -0.2, -0.3, -0.4))
        assert not stopped_answer.truncated and not stopped_answer.broken_off
        assert stopped_answer.stretches == ((4, 3), (5, 1)) and stopped_answer.weight_version == 4
        assert stopped_answer.routing is not None and stopped_answer.routing.flatten().tolist() == [0, 1, 2, 3]
    assert stopped(begun, params) is begun


def test_answer_interrupted_at_its_end_is_complete() -> None:
    at_end = Completion((3, STOP), (-1.0, -1.0), False, 2, broken_off=True)
    assert not ended(at_end, (STOP,), 9).broken_off and not ended(at_end, (STOP,), 9).truncated
    full = Completion((3, 4), (-1.0, -1.0), False, 2, broken_off=True)
    assert ended(full, (STOP,), 2).truncated and not ended(full, (STOP,), 2).broken_off
    assert ended(full, (STOP,), 3) is full


class Interrupted(EngineBase):
    """Answers the unanswered requests of a pause with the tokens of `partial`, and those of a poll with `rest`."""

    def __init__(self) -> None:
        super().__init__()
        self.version, self.partial, self.rest = 1, tuple[int, ...](), (4, STOP)
        self.requests: list[GenerateRequest] = []
        self._futures: list[Future[Completion]] = []

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        futures = [Future[Completion]() for _ in requests]
        self.requests += requests
        self._futures += futures
        return futures

    def _answer(self, token_ids: tuple[int, ...], *, broken_off: bool) -> None:
        futures, self._futures = self._futures, []
        logprobs = (-float(self.version),) * len(token_ids)
        for future in futures:
            future.set_result(Completion(token_ids, logprobs, False, self.version, broken_off=broken_off))

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        self._answer(self.rest, broken_off=False)

    def pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            self._answer(self.partial, broken_off=True)

    def update_weights(self, named_tensors: Any, version: int) -> SyncReport:
        self.version = version
        return SyncReport(())


def tracked_requests(engine: EngineBase, count: int) -> tuple[RequestTracker, list[TrackedRequest]]:
    """Return a tracker for a vocabulary of 16 tokens, and requests of at most 5 tokens."""
    params = SamplingParams(1.0, 5, (STOP,))
    return RequestTracker(engine, 16), [TrackedRequest(GenerateRequest((7, n), n, n), params) for n in range(count)]


def test_requests_continue_after_a_pause() -> None:
    """Requests that arrive during the pause wait. Requests without tokens are repeated, and dropped requests are
    not."""
    engine = Interrupted()
    tracker, (first, dropped, later) = tracked_requests(engine, 3)
    tracker.submit([first, dropped])
    tracker.pause("abort")
    tracker.submit([later])
    dropped.future.cancel()
    assert len(engine.requests) == 2 and first.answer is None
    tracker.resume()
    assert engine.requests[2:] == [first.request, later.request]
    engine.partial = (3,)
    tracker.pause("abort")
    assert first.answer is not None and first.answer.broken_off and not first.future.done()
    engine.version = 2
    tracker.resume()
    assert [request.token_ids for request in engine.requests[4:]] == [(7, 0, 3), (7, 2, 3)]
    assert [request.max_new_tokens for request in engine.requests[4:]] == [4, 4]
    engine.poll(1.0)
    for each in (first, later):
        whole = each.future.result(0)
        assert (whole.token_ids, whole.logprobs) == ((3, 4, STOP), (-1.0, -2.0, -2.0))
        assert whole.stretches == ((1, 1), (2, 2)) and not whole.broken_off


def test_paused_requests_are_submitted_once() -> None:
    engine = Interrupted()
    tracker, (first, later) = tracked_requests(engine, 2)
    tracker.submit([first])
    tracker.pause("keep")
    tracker.submit([later])
    tracker.resume()
    engine.poll(1.0)
    assert engine.requests == [first.request, later.request]
    assert first.future.result(0).token_ids == later.future.result(0).token_ids == (4, STOP)


def test_interrupted_response_with_unknown_token_ends() -> None:
    """The caller reports the token. A model could not read the continued request."""
    engine = Interrupted()
    tracker, (tracked,) = tracked_requests(engine, 1)
    tracker.submit([tracked])
    engine.partial = (3, 16)
    tracker.pause("abort")
    answer = tracked.future.result(0)
    assert (answer.token_ids, answer.broken_off) == ((3, 16), False)
    tracker.resume()
    assert len(engine.requests) == 1
