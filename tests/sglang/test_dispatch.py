"""Requests are spread over servers and survive those that die, hang, refuse or lie; those here are stand-ins."""

from __future__ import annotations

import asyncio
import base64
import gc
import importlib.util
import itertools
import json
import math
import re
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megappo.config.engine import LEAST_REQUEST_SECONDS, SGLangSettings
from megappo.config.schema import RuntimeSettings
from megappo.engines.protocol import CacheUse, Completion, GenerateRequest, RequestStream, SamplingParams
from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.runtime.deadlines import Deadlines
from megappo.runtime.waiting import wait_until
from megappo.types import RoutingShape

if importlib.util.find_spec("aiohttp") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

from aiohttp import web

from megappo.engines.sglang import dispatch
from megappo.engines.sglang.dispatch import Outcome, Round, RoundLimits
from megappo.engines.sglang.engine import SGLangEngine
from megappo.engines.sglang.homes import Homes
from megappo.engines.sglang.in_flight import Departures, InFlightRound, abort_servers
from megappo.engines.sglang.rounds import Rounds, answers_of_each
from megappo.engines.sglang.server import EngineError
from megappo.engines.sglang.streaming import OpenRound
from megappo.observe.progress import PROGRESS

pytestmark = [pytest.mark.slow, pytest.mark.waits]

PARAMS = SamplingParams(temperature=0.5, max_new_tokens=4, stop_token_ids=(1,))
Answer = Callable[[dict[str, Any]], Any]


class StandIn:
    """A server that answers /generate as told and counts the samples it was asked for."""

    def __init__(self, index: int, seconds: float = 0.0) -> None:
        self.index, self.seconds, self.asked = index, seconds, 0
        self.version, self.status, self.healthy = "7", 200, True
        self.health_seconds = 0.0
        self.answered_at: list[float] = []
        self.fail_after: int | None = None
        """Breaks the connection once so many samples were asked for."""
        self.hang_after: int | None = None
        self.page: str | None = None
        """What it says instead of an answer."""
        self.logprob: float | None = -0.5
        """Of the first token of each answer."""
        self.bodies: list[dict[str, Any]] = []
        self.routing: Callable[[int], str] | None = None
        """What it says of the experts of a sample, by the last token of its prompt."""
        self.cached_tokens: Callable[[list[int]], int] = lambda ids: 0
        """How many of a prompt's tokens its prefix cache has."""
        self.running = 0
        """Samples that it is making tokens for."""
        self.under_way = self.most_under_way = 0
        """Requests at a time."""
        self.aborts = 0
        self.ends_on_abort: set[asyncio.Event] = set()
        """Of the requests under way."""
        self.spans: list[dict[str, Any]] | None = None
        """Which tokens are of which weights."""
        self.finish = "stop"
        """Reason for which each answer ends."""
        self.begins = True
        """Whether a request that is aborted has a token by then."""
        self.may_answer: Callable[[], bool] = lambda: True
        """Answers are held back until this is so."""
        self._ready = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()
        assert self._ready.wait(10)

    def _serve(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health_generate", self._health)
        app.router.add_get("/v1/loads", self._loads)
        runner = web.AppRunner(app)
        loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        loop.run_until_complete(site.start())
        self.endpoint = Endpoint(self.index, f"http://127.0.0.1:{runner.addresses[0][1]}", "key", 0)
        self._ready.set()
        loop.run_forever()

    async def _health(self, _request: web.Request) -> web.Response:
        await asyncio.sleep(self.health_seconds)
        return web.Response(status=200 if self.healthy else 503)

    async def _abort(self, request: web.Request) -> web.Response:
        assert await request.json() == {"abort_all": True}
        self.aborts += 1
        for end in self.ends_on_abort:
            end.set()
        return web.Response()

    async def _loads(self, _request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})

    async def _generate(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        body = await request.json()
        self.bodies.append(body)
        self.asked += len(body["input_ids"])
        if self.fail_after is not None and self.asked > self.fail_after:
            assert request.transport is not None
            request.transport.abort()
        if self.hang_after is not None and self.asked > self.hang_after:
            await asyncio.sleep(60)
        self.running += len(body["input_ids"])
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.ends_on_abort.add(end := asyncio.Event())
        with suppress(TimeoutError):
            await asyncio.wait_for(end.wait(), self.seconds * len(body["input_ids"]))
        while not self.may_answer():
            await asyncio.sleep(0.005)
        self.ends_on_abort.remove(end)
        self.under_way -= 1
        self.running -= len(body["input_ids"])
        if self.status != 200:
            return web.Response(status=self.status, text="because")
        if self.page is not None:
            return web.Response(text=self.page, content_type="text/html")
        self.answered_at.append(time.monotonic())
        texts = [self._text(ids) if not end.is_set() else self._aborted(ids) for ids in body["input_ids"]]
        if body["return_routed_experts"] and self.routing is not None:
            for ids, text in zip(body["input_ids"], texts, strict=True):
                text["meta_info"]["routed_experts"] = self.routing(ids[-1])
        return web.json_response(texts)

    def _text(self, ids: list[int]) -> dict[str, Any]:
        return {
            "output_ids": [ids[-1], 1],
            "meta_info": {
                "finish_reason": {"type": self.finish, "matched": 1},
                "weight_version": self.version,
                "prompt_tokens": len(ids),
                "cached_tokens": self.cached_tokens(ids),
                "output_token_logprobs": [[self.logprob, ids[-1], None], [-0.25, 1, None]],
            }
            | ({} if self.spans is None else {"weight_versions": self.spans}),
        }

    def _aborted(self, ids: list[int]) -> dict[str, Any]:
        """As SGLang answers: without a word of log-probabilities for what it has not begun."""
        meta: dict[str, Any] = {"finish_reason": {"type": "abort"}, "weight_version": self.version}
        if not self.begins:
            return {"output_ids": [], "meta_info": meta}
        return {"output_ids": [ids[-1]], "meta_info": meta | {"output_token_logprobs": [[-0.5, ids[-1], None]]}}


def settings(**changes: Any) -> SGLangSettings:
    return SGLangSettings(**({"stall_timeout_seconds": 0.5, "health_timeout_seconds": 1.0} | changes))


def limits(**changes: Any) -> RoundLimits:
    """Those of `settings`, with the request's deadline that is given there."""
    given = settings(**changes)
    request_seconds = given.request_timeout_seconds or LEAST_REQUEST_SECONDS
    return RoundLimits.of(given, replace(Deadlines.of(RuntimeSettings()), request_seconds=request_seconds))


def spread(servers: list[StandIn], count: int = 200, params: SamplingParams = PARAMS, **changes: Any) -> Outcome:
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(count)}
    return Round([s.endpoint for s in servers], requests, params, 7, limits(**changes)).result()


def complete(outcome: Outcome, count: int = 200) -> bool:
    """Every request has its own answer, once."""
    return (
        all(outcome.completions[i].token_ids == (100 + i, 1) for i in range(count))
        and len(outcome.completions) == count
    )


def test_work_follows_speed() -> None:
    fast, slow = StandIn(0, 0.001), StandIn(1, 0.02)
    outcome = spread([fast, slow], max_inflight_sequences=16)
    assert complete(outcome) and not outcome.failures
    assert fast.asked + slow.asked == 200
    assert fast.asked > 2 * slow.asked > 0
    assert outcome.completions[3].logprobs == (-0.5, -0.25)
    sampling = fast.bodies[0]["sampling_params"][0]
    assert sampling["temperature"] == 0.5 and sampling["stop_token_ids"] == [1] and "sampling_seed" in sampling


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, (1, 1.0)), (0.5, (-1, 1e-9))])
def test_greedy_requests_keep_the_scale_of_log_probabilities(temperature: float, expected: tuple[int, float]) -> None:
    """SGLang gives those of the unscaled distribution where it takes the largest, which at 1 are the same."""
    server = StandIn(0)
    spread([server], 1, replace(PARAMS, temperature=temperature, greedy=True))
    (asked,) = server.bodies[0]["sampling_params"]
    assert (asked["top_k"], asked["top_p"]) == expected
    assert asked["temperature"] == temperature


def test_samples_and_tokens_are_counted() -> None:
    seen: list[str] = []
    PROGRESS.enter("rollout")
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(9)}
    servers = [StandIn(0, 0.01).endpoint]
    on_tokens = lambda: seen.append(PROGRESS.text())  # noqa: E731 - asked just before the answers are counted
    sent = Round(servers, requests, PARAMS, 7, limits(max_inflight_sequences=3), on_tokens)
    assert "0 of 9 samples of this rank" in PROGRESS.text()
    assert complete(sent.result(), 9)
    seen.append(PROGRESS.text())
    PROGRESS.leave()
    counts = [int(text.split(": ")[1].split(" of 9 samples")[0]) for text in seen]
    assert counts == sorted(set(counts)) and counts[0] == 0 and counts[-1] == 9 and len(counts) > 3
    assert "tokens/s" in seen[-1]
    assert all("1 of 1 servers busy" in text for text in seen[:-1]) and "busy" not in seen[-1]


def test_everything_is_under_way_at_once() -> None:
    """In groups of at most 32 that shrink towards the end, and no more samples than a server may have."""
    server = StandIn(0, 0.05)
    assert complete(spread([server], 200))
    sizes = [len(body["input_ids"]) for body in server.bodies]
    assert max(sizes) == 32 and sizes[-1] == 1
    assert server.most_under_way == len(sizes)
    limited = StandIn(0, 0.02)
    assert complete(spread([limited], 40, max_inflight_sequences=3), 40)
    assert max(len(body["input_ids"]) for body in limited.bodies) == 3


def test_ranks_with_few_prompts_load_all_engines_alike() -> None:
    """Four prompts of two samples on each of 16 ranks, over eight servers."""
    servers = [StandIn(i) for i in range(8)]
    for rank in range(16):
        numbers = range(8 * rank, 8 * rank + 8)
        requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i // 2) for i in numbers}
        assert len(Round([s.endpoint for s in servers], requests, PARAMS, 7, limits()).result().completions) == 8
    assert [server.asked for server in servers] == [16] * 8
    prompts = [{(ids[-1] - 100) // 2 for body in server.bodies for ids in body["input_ids"]} for server in servers]
    assert [len(found) for found in prompts] == [8] * 8  # both samples of each


def test_a_dead_engine_gives_its_work_to_the_others() -> None:
    well, dying = StandIn(0, 0.002), StandIn(1, 0.002)
    dying.fail_after = 30
    outcome = spread([well, dying])
    assert complete(outcome)
    assert list(outcome.failures) == [1] and "closed the connection during generation" in outcome.failures[1]


def test_a_hung_engine_is_asked_for_its_health_first() -> None:
    well, hanging = StandIn(0), StandIn(1)
    hanging.hang_after, hanging.healthy = 20, False
    started = time.monotonic()
    outcome = spread([well, hanging])
    assert complete(outcome)
    assert list(outcome.failures) == [1] and "failed its health check" in outcome.failures[1]
    assert time.monotonic() - started < 10


def test_others_go_on_while_a_hung_engine_is_asked() -> None:
    well, hanging = StandIn(0, 0.01), StandIn(1)
    hanging.hang_after, hanging.health_seconds = 0, 60.0
    outcome = spread([well, hanging], max_inflight_sequences=4, health_timeout_seconds=3.0)
    assert complete(outcome) and list(outcome.failures) == [1]
    pauses = [later - earlier for earlier, later in zip(well.answered_at, well.answered_at[1:], strict=False)]
    assert max(pauses[:40]) < 1.5  # groups of at most four, 196 samples: all of that while the other one is waited for


def test_a_slow_engine_that_is_well_is_waited_for() -> None:
    slow = StandIn(0, 0.2)
    outcome = spread([slow], 20)
    assert complete(outcome, 20) and not outcome.failures


def test_a_request_that_nothing_comes_of_has_a_deadline() -> None:
    """The server is well, but works on nothing."""
    lost = StandIn(0)
    lost.hang_after = 0
    outcome = spread([lost], 5, request_timeout_seconds=1.0)
    assert outcome.completions == {}
    assert "returned no response within 1 seconds and has no request in progress" in outcome.failures[0]


def test_no_deadline_ends_a_request_that_tokens_are_made_for() -> None:
    slow = StandIn(0, 0.6)
    told: list[float] = []
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(5)}
    patient = limits(request_timeout_seconds=0.5, stall_timeout_seconds=60.0)
    outcome = Round([slow.endpoint], requests, PARAMS, 7, patient, lambda: told.append(time.monotonic())).result()
    assert complete(outcome, 5) and not outcome.failures
    assert len(told) >= 3  # and whoever waits for the rollout was told that it goes on


def test_without_engines_everything_is_left() -> None:
    outcome = spread([], 5)
    assert outcome.completions == {}


def test_other_weights_are_not_taken() -> None:
    well, old = StandIn(0), StandIn(1)
    old.version = "6"
    outcome = spread([well, old])
    assert complete(outcome)
    assert "generated with weights ['6'], not 7" in outcome.failures[1]


def test_log_probabilities_that_json_has_no_word_for_are_nan() -> None:
    """SGLang writes null for them; who trains on the answers refuses them."""
    server = StandIn(0)
    server.logprob = None
    answer = spread([server], 1).completions[0]
    assert math.isnan(answer.logprobs[0]) and answer.logprobs[1] == -0.25


def test_what_is_no_answer_is_a_failed_server() -> None:
    """A proxy's page, say, with a status that promises an answer."""
    page, well = StandIn(0), StandIn(1)
    page.page = "<html>please wait</html>"
    outcome = spread([page, well])
    assert complete(outcome)
    assert "answered what is no JSON: b'<html>please wait</html>'" in outcome.failures[0]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ('{"detail": "ok"}', "returned a response that is not a list of answers"),
        ('[{"text": "ok"}]', "returned a response that is not a list of answers (KeyError('meta_info')): b'[{"),
        ("[[1], [2]]", "returned a response that is not a list of answers"),
        ("[]", "gave 0 answers to"),
    ],
)
def test_an_answer_of_another_form_is_a_failed_servers(said: str, words: str) -> None:
    """Such as another version's; its requests are answered by others."""
    strange, well = StandIn(0), StandIn(1)
    strange.page = said
    outcome = spread([strange, well])
    assert complete(outcome)
    assert words in outcome.failures[0]


def test_answers_are_read_without_the_garbage_collector() -> None:
    """It is back afterwards, and stays off where it was."""
    collecting: list[bool] = []
    loads = json.loads

    def read(content: bytes) -> Any:
        collecting.append(gc.isenabled())
        return loads(content)

    with mock.patch.object(dispatch.json, "loads", read):
        assert complete(spread([StandIn(0)], 40), 40)
        assert collecting and not any(collecting) and gc.isenabled()
        gc.disable()
        try:
            assert complete(spread([StandIn(0)], 40), 40) and not gc.isenabled()
        finally:
            gc.enable()


def test_a_refused_request_stops_the_run() -> None:
    server = StandIn(0)
    server.status = 400
    refusal = spread([server]).refusal
    assert refusal is not None and "rejected a generation request: because" in refusal


def test_what_makes_servers_fail_each_time_ends_the_run(world_of_one: None) -> None:
    """Not what fails while something else is answered, nor failures in rounds apart."""
    rounds, left = Rounds(), [GenerateRequest((5,) * 9, seed=0, prompt_id=41)]
    failing = [StandIn(0), StandIn(1)]
    for server in failing:
        server.status = 500

    def agree() -> tuple[bool, dict[int, str]]:
        sent = Round([server.endpoint for server in failing], dict(enumerate(left)), PARAMS, 7, limits())
        return rounds.agree(1, sent.result(), left)

    for _ in range(2):
        is_over, failures = agree()
        assert not is_over and sorted(failures) == [0, 1] and "failed to generate: because" in failures[0]
    partly = spread([StandIn(2)], 3)
    assert partly.answered == 3
    partly.failures[0] = "it died"
    assert rounds.agree(1, partly) == (False, {0: "it died"})
    for _ in range(2):
        agree()
    sentence = (
        "failed 3 times in a row before any request was answered; the likely cause is a remaining request, "
        "such as prompt 41, of 9 tokens, or"
    )
    with pytest.raises(EngineError, match=f"{sentence} the machines.*failed to generate: because"):
        agree()
    assert rounds.agree(0, Outcome()) == (True, {})


def test_a_round_can_be_given_up() -> None:
    server = StandIn(0)
    server.hang_after = 0
    requests = {0: GenerateRequest((2, 3), seed=0, prompt_id=0)}
    round_ = Round([server.endpoint], requests, PARAMS, 7, limits(stall_timeout_seconds=60.0))
    started = time.monotonic()
    round_.cancel()
    assert time.monotonic() - started < 5


class AskedLater:
    """Asked to stop once a round has taken an answer, which on busy cores is later than the server gives it."""

    asked = False

    def ask(self) -> None:
        self.asked = True

    def check(self) -> None:
        raise AssertionError("the round leaves that to its caller")


def test_a_run_that_is_asked_to_stop_takes_what_has_come() -> None:
    server = StandIn(0)
    server.hang_after = 40
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(200)}
    stop = AskedLater()
    round_ = Round([server.endpoint], requests, PARAMS, 7, limits(stall_timeout_seconds=60.0), stop.ask)
    started = time.monotonic()
    outcome = round_.result(stop)
    assert time.monotonic() - started < 20
    assert 0 < len(outcome.completions) < 200 and not outcome.failures
    assert all(outcome.completions[i].token_ids == (100 + i, 1) for i in outcome.completions)


@contextmanager
def silent_port() -> Iterator[str]:
    """Something that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_every_control_request_has_a_deadline() -> None:
    with silent_port() as url, pytest.raises(ServerFailure, match="did not answer /x within 0.5 seconds"):
        call(Endpoint(0, url, "", 0), "/x", timeout_seconds=0.5)
    with pytest.raises(ServerFailure, match="cannot be reached for /x"):
        call(Endpoint(0, "http://127.0.0.1:9", "", 0), "/x", timeout_seconds=0.5)


def test_routing_is_asked_for_and_read() -> None:
    """In as few bytes as it fits into; what is no expert's number stays none. Each answer travels alone."""
    shape = RoutingShape(layers=2, experts_per_token=2, experts=200)
    server = StandIn(0)

    def routing(token: int) -> str:
        numbers = [0, 1, 2, 3, 199, token - 100, -1, 7, 200, 5, 6, 8]  # three tokens, two layers, two experts
        return base64.b64encode(torch.tensor(numbers, dtype=torch.int32).numpy().tobytes()).decode()

    server.routing = routing
    outcome = spread([server], 40, replace(PARAMS, routing=shape))
    assert complete(outcome, 40) and not outcome.failures
    assert all(len(body["input_ids"]) == 1 for body in server.bodies)
    for i in (0, 39):
        found = outcome.completions[i].routing
        assert found is not None and found.dtype == torch.uint8
        assert found.tolist() == [[[0, 1], [2, 3]], [[199, i], [255, 7]], [[255, 5], [6, 8]]]


@pytest.mark.parametrize("said", [None, "", "AAAA", "AAAAAAAA"])
def test_a_server_without_routing_failed(said: str | None) -> None:
    server = StandIn(0)
    server.routing = None if said is None else lambda _: str(said)
    outcome = spread([server], 2, replace(PARAMS, routing=RoutingShape(1, 1, 4)))
    assert not outcome.completions
    assert "did not return the experts of all 3 x 1 x 1 positions" in outcome.failures[0]


class Chats:
    """So many chats of three turns each, all at the same time: the next is asked for once one is answered."""

    def __init__(self, count: int) -> None:
        self.waiting = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(count)}
        self.turns: dict[int, list[tuple[int, ...]]] = {i: [] for i in range(count)}
        self.ended: list[int] = []
        self._line: OpenRound | None = None

    def drive(self, line: RequestStream) -> int:
        assert isinstance(line, OpenRound)
        self._line = line
        for number, request in list(self.waiting.items()):
            line.send(number, request)
        assert wait_until(lambda: not self.waiting or line.is_over, 20.0, every_seconds=0.005)
        return len(self.waiting)

    def answered(self, number: int, completion: Completion) -> None:
        request = self.waiting.pop(number)
        self.turns[number].append(completion.token_ids)
        if len(self.turns[number]) < 3:
            self.waiting[number] = replace(request, token_ids=(*request.token_ids, 100 + number))
            assert self._line is not None
            self._line.send(number, self.waiting[number])
        else:
            self.ended.append(number)


def chat(servers: list[StandIn], count: int = 40, **changes: Any) -> tuple[Chats, int, Outcome]:
    """What came of it, the requests that are left, and which servers failed."""
    chats = Chats(count)
    return chats, *drive(servers, chats, **changes)


def drive(servers: list[StandIn], chats: Chats, **changes: Any) -> tuple[int, Outcome]:
    """Hold the chats with these servers; the requests that are left of them, and which servers failed."""
    line = OpenRound([s.endpoint for s in servers], chats, PARAMS, 7, limits(**changes))
    try:
        left = chats.drive(line)
    finally:
        outcome = line.hang_up()
    return left, outcome


def test_turns_are_answered_while_others_come() -> None:
    """Each alone, all of an episode by one server; who is slow holds nobody up."""
    fast, slow, chats = StandIn(0), StandIn(1), Chats(40)
    slow.may_answer = lambda: len(chats.ended) >= 10  # which have ended without it
    left, outcome = drive([fast, slow], chats, max_inflight_sequences=64)
    assert left == 0 and not outcome.failures
    assert all(turns == [(100 + i, 1)] * 3 for i, turns in chats.turns.items())
    assert all(len(body["input_ids"]) == 1 for server in (fast, slow) for body in server.bodies)
    by_server = [{body["input_ids"][0][1] for body in server.bodies} for server in (fast, slow)]
    assert not by_server[0] & by_server[1]
    assert {prompt + 100 for prompt in chats.ended[:10]} <= by_server[0]


def test_turns_stay_with_the_server_of_the_first_though_another_fails() -> None:
    """Which then answers what the lost one's episodes have left, all turns of an episode by one of the others."""
    servers = [StandIn(i, 0.005) for i in range(4)]
    servers[1].fail_after = 5
    chats, left, outcome = chat(servers)
    assert left == 0 and outcome.failures.keys() == {1}
    assert all(turns == [(100 + i, 1)] * 3 for i, turns in chats.turns.items())
    fine = [server for server in servers if server.index != 1]
    served = [Counter(body["input_ids"][0][1] - 100 for body in server.bodies) for server in fine]
    assert all(not a & b for a, b in itertools.combinations(served, 2))
    assert all(served[fine.index(servers[i % 4])][i] == 3 for i in range(40) if i % 4 != 1)


def test_answers_asked_for_piece_by_piece_stay_with_their_server() -> None:
    """However their lengths differ by then, and though numbers of prompts are those of others in between."""
    servers, homes = [StandIn(i) for i in range(3)], Homes()

    def ask(prompts: dict[int, tuple[int, ...]]) -> dict[int, int]:
        """The server of each prompt, whose two samples are asked for."""
        for server in servers:
            server.bodies.clear()
        requests = {2 * p + s: GenerateRequest((*ids, 100 + p), s, p) for p, ids in prompts.items() for s in (0, 1)}
        endpoints = [server.endpoint for server in servers]
        outcome = Round(endpoints, requests, PARAMS, 7, limits(), homes=homes).result()
        assert len(outcome.completions) == 2 * len(prompts)
        found = [(ids[-1] - 100, s.index) for s in servers for body in s.bodies for ids in body["input_ids"]]
        assert len(set(found)) == len(prompts), "the samples of a prompt went to several servers"
        return dict(found)

    first = ask({p: (2, p) for p in range(12)})
    assert Counter(first.values()) == {0: 4, 1: 4, 2: 4}
    longer = {p: (2, p, 100 + p, *[5] * (7 * p % 31)) for p in range(1, 12, 2)}
    assert ask(longer) == {p: first[p] for p in longer}
    others = ask({p: (3, p, *[5] * (11 * p % 31)) for p in range(12)})
    assert Counter(others.values()) == {0: 4, 1: 4, 2: 4} and others != first
    homes.forget()
    assert ask({p: (2, p) for p in range(12)}) == first


@pytest.mark.parametrize("continued", [False, True])
def test_the_longest_prompts_are_sent_first(continued: bool) -> None:
    """Also among those that stay with the server that answered their beginnings."""
    server, homes = StandIn(0), Homes()
    begun = {p: GenerateRequest((2, 100 + p), p, p) for p in range(5)}
    if continued:
        assert len(Round([server.endpoint], begun, PARAMS, 7, limits(), homes=homes).result().completions) == 5
        server.bodies.clear()
    longer = {p: replace(begun[p], token_ids=(2, 100 + p, *[5] * (3 * p % 5))) for p in begun}
    one_by_one = limits(max_inflight_sequences=1)
    assert len(Round([server.endpoint], longer, PARAMS, 7, one_by_one, homes=homes).result().completions) == 5
    assert [len(ids) for body in server.bodies for ids in body["input_ids"]] == [6, 5, 4, 3, 2]


def test_hits_of_the_prefix_caches_are_counted_by_server() -> None:
    """Of what one answered before it failed, too."""
    servers = [StandIn(0), StandIn(1)]
    servers[1].cached_tokens = lambda ids: len(ids) - 1
    outcome = spread(servers, 40)
    assert complete(outcome, 40) and not outcome.failures
    assert outcome.cache == {0: CacheUse(40, 0), 1: CacheUse(40, 20)}
    servers[1].fail_after = servers[1].asked
    _, left, outcome = chat(servers, 4)
    assert left == 0
    assert outcome.cache == {0: CacheUse(sum(range(2, 5)) * 4, 0)}


def test_turns_of_a_lost_server_go_elsewhere_or_are_left() -> None:
    fine, broken = StandIn(0), StandIn(1)
    broken.fail_after = 10
    chats, left, outcome = chat([fine, broken])
    assert left == 0 and outcome.failures.keys() == {1}
    assert all(turns == [(100 + i, 1)] * 3 for i, turns in chats.turns.items())
    fine.fail_after = fine.asked + 10
    chats, left, outcome = chat([fine, broken])
    assert left == len(chats.waiting) > 0 and outcome.failures.keys() == {0, 1}
    again = StandIn(2)
    line = OpenRound([again.endpoint], chats, PARAMS, 7, limits())
    assert chats.drive(line) == 0  # what is left is asked again
    line.hang_up()
    assert all(turns == [(100 + i, 1)] * 3 for i, turns in chats.turns.items())


def test_a_refused_turn_ends_the_round() -> None:
    server = StandIn(0)
    server.status = 400
    _, left, outcome = chat([server])
    assert left == 40 and "rejected a generation request" in str(outcome.refusal)


def in_flight(servers: list[StandIn], count: int, **changes: Any) -> InFlightRound:
    line = InFlightRound([s.endpoint for s in servers], PARAMS, 7, limits(**changes))
    for i in range(count):
        line.send(i, GenerateRequest((2, 100 + i), seed=i, prompt_id=i))
    return line


def taken(line: InFlightRound, count: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    assert wait_until(lambda: len(found.update(line.take(0.01)) or found) >= count, 20.0, every_seconds=0.0)
    return found


def test_answers_are_taken_as_they_come_and_the_rest_is_broken_off(world_of_one: None) -> None:
    """Begun, not begun by the server, and not sent any more."""
    fast, slow, full = StandIn(0, 0.001), StandIn(1, 30.0), StandIn(2, 30.0)
    full.begins = False
    line = in_flight([fast, slow, full], 30, max_inflight_sequences=4)
    found = taken(line, 22)  # all but what the others have in hand
    assert all(found[i] == Completion((100 + i, 1), (-0.5, -0.25), False, 7) for i in range(0, 30, 3))
    assert wait_until(lambda: slow.running == full.running == 4, 10.0, every_seconds=0.01) and line.take(0.0) == {}
    line.break_off()
    line.send(30, GenerateRequest((2, 130), seed=30, prompt_id=30))
    assert abort_servers(line, [s.endpoint for s in (fast, slow, full)], settings()) == {}
    assert fast.aborts == slow.aborts == full.aborts >= 2
    rest, outcome = line.end()
    assert not outcome.failures and rest.keys() | found.keys() == set(range(31)) and not rest.keys() & found.keys()
    assert all(answer.broken_off and not answer.truncated and answer.weight_version == 7 for answer in rest.values())
    begun = {i: answer.token_ids for i, answer in rest.items() if answer.token_ids}
    assert len(begun) == 4 and all(tokens == (100 + i,) and i % 3 == 1 for i, tokens in begun.items())


@pytest.mark.parametrize("listens", [False, True])
def test_a_round_that_lasts_forgets_what_was_answered(world_of_one: None, listens: bool) -> None:
    server, hears = StandIn(0, 0.001), Hears()
    line = InFlightRound([server.endpoint], PARAMS, 7, limits(), listener=hears if listens else None)
    requests = []
    for i in range(20):
        request = GenerateRequest((2, 100 + i), seed=i, prompt_id=i)
        requests.append(weakref.ref(request))
        line.send(i, request)
    del request
    if listens:
        assert wait_until(lambda: len(hears.found) == 20, 20.0, every_seconds=0.01)
    else:
        taken(line, 20)
    assert wait_until(lambda: gc.collect() >= 0 and not any(one() for one in requests), 20.0, every_seconds=0.01)
    line.end()


class Hears:
    """A `Listener`."""

    def __init__(self) -> None:
        self.found: list[tuple[int, Completion]] = []

    def answered(self, number: int, completion: Completion) -> None:
        self.found.append((number, completion))


def test_turns_in_flight_come_to_who_listens(world_of_one: None) -> None:
    """Also those that are broken off; while servers are started again they are kept back."""
    server, hears, departures = StandIn(0, 0.001), Hears(), Departures()

    def send(number: int, last: int) -> None:
        request = GenerateRequest((2, last), seed=number, prompt_id=number)
        departures.send(
            {number: request}, lambda: InFlightRound([server.endpoint], PARAMS, 7, limits(), listener=hears)
        )

    with departures.kept_back():
        send(3, 100)
        assert departures.stream is None
    assert wait_until(lambda: len(hears.found) == 1, 10.0, every_seconds=0.01)
    send(3, 101)  # the next turn has the same number
    assert wait_until(lambda: len(hears.found) == 2, 10.0, every_seconds=0.01)
    assert [(n, c.token_ids[0], c.broken_off) for n, c in hears.found] == [(3, 100, False), (3, 101, False)]
    server.seconds = 30.0
    send(4, 102)
    assert wait_until(lambda: server.running == 1, 10.0, every_seconds=0.01)
    line = departures.take_stream()
    assert line is not None and departures.stream is None
    line.break_off()
    line.send(5, GenerateRequest((2, 103), seed=5, prompt_id=5))
    assert abort_servers(line, [server.endpoint], settings()) == {}
    rest, _ = line.end()
    assert rest.keys() == {5} and rest[5].broken_off and not rest[5].token_ids
    assert hears.found[2:] == [(4, replace(hears.found[2][1], broken_off=True))]


def test_a_server_that_gives_nothing_back_is_named(world_of_one: None) -> None:
    deaf = StandIn(0, 30.0)
    line = in_flight([deaf], 3, sync_timeout_seconds=0.3, stall_timeout_seconds=60.0)
    assert wait_until(lambda: deaf.running == 3, 10.0, every_seconds=0.01)
    line.break_off()
    failed = abort_servers(line, [], settings(sync_timeout_seconds=0.3))  # nobody tells it
    assert failed.keys() == {0} and "did not return its requests after an abort" in failed[0]
    rest, _ = line.end()
    assert rest.keys() == {0, 1, 2} and not any(answer.token_ids for answer in rest.values())


def test_an_abort_ends_at_once_after_a_refusal(world_of_one: None) -> None:
    """Neither the refused request nor those of other servers have an answer. The refusal itself ends the run when it is
    read."""
    refusing, slow = StandIn(0, 0.01), StandIn(1, 30.0)
    refusing.status = 400
    line = in_flight([refusing, slow], 6, sync_timeout_seconds=60.0)
    assert wait_until(lambda: line.is_over, 10.0, every_seconds=0.01)
    assert "rejected a generation request: because" in str(line.refusal)
    line.break_off()
    given = settings(sync_timeout_seconds=9.0, health_timeout_seconds=30.0)
    assert abort_servers(line, [refusing.endpoint, slow.endpoint], given) == {}
    rest, outcome = line.end()
    assert rest.keys() == {*range(6)} and all(answer.broken_off and not answer.token_ids for answer in rest.values())
    assert outcome.refusal and not outcome.failures


def test_a_probe_that_is_refused_says_why(world_of_one: None) -> None:
    well, refusing = StandIn(0), StandIn(1)
    refusing.status = 400
    request = GenerateRequest((2, 100), seed=0, prompt_id=0)

    def probes(*servers: StandIn) -> list[Round]:
        return [Round([server.endpoint], {server.index: request}, PARAMS, 7, limits()) for server in servers]

    with pytest.raises(EngineError, match="server 1 .* rejected a generation request: because"):
        answers_of_each(probes(well, refusing))
    refusing.status = 500
    answers, failures = answers_of_each(probes(well, refusing))
    assert answers.keys() == {0} and failures.keys() == {1} and "failed to generate" in failures[1]


def test_a_response_that_ends_before_its_limit_is_refused() -> None:
    """SGLang ends a response early where its context or its pool is full, and names the limit as the reason."""
    server = StandIn(0)
    server.finish = "length"
    assert "ended a response after 2 of 4 tokens because its context or its pool is full" in str(
        spread([server], 3).refusal
    )
    assert complete(spread([server], 3, replace(PARAMS, max_new_tokens=2)), 3)


def test_servers_that_hold_their_requests_are_not_missed(world_of_one: None) -> None:
    """They give nothing, and are not well, for longer than others may. Their answers say which weights made a token."""
    server = StandIn(0, 2.5)
    server.healthy = False
    server.version, server.spans = "8", [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    line = in_flight([server], 3)
    line.hold()
    with line.given(8):
        assert not wait_until(lambda: line.is_over, 2.0, every_seconds=0.1)
        found = taken(line, 3)
    assert not line.failures
    assert found[1] == Completion((101, 1), (-0.5, -0.25), False, 7, stretches=((7, 1), (8, 1)))
    line.end()


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([("7", 0, 1), ("9", 1, 2)], r"generated with weights \['7', '8', '9'\], not 7 to 8"),
        ([("7", 0, 1), ("8", 1, 3)], "does not report the weight version of each of 2 tokens"),
        ([("7", 0, 1)], "does not report the weight version of each of 2 tokens"),
        ([("7", 0, 0), ("8", 1, 2)], "does not report the weight version of each of 2 tokens"),
    ],
)
def test_what_a_server_says_of_weights_is_checked(
    spans: list[tuple[str, int, int]], words: str, world_of_one: None
) -> None:
    server = StandIn(0, 0.2)
    server.version = "8"
    server.spans = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    line = in_flight([server], 1)
    with line.given(8):
        assert wait_until(lambda: line.is_over, 10.0, every_seconds=0.01)
    assert re.search(words, line.failures[0])
    line.end()


def test_an_abort_that_nobody_asked_for_is_a_failure(world_of_one: None) -> None:
    server = StandIn(0, 30.0)
    line = in_flight([server], 1)
    assert wait_until(lambda: server.running == 1, 10.0, every_seconds=0.01)
    call(server.endpoint, "/abort_request", {"abort_all": True}, timeout_seconds=5)
    assert wait_until(lambda: line.is_over, 10.0, every_seconds=0.01) and "broke a response off" in line.failures[0]
    line.end()


def test_an_engine_that_holds_no_weights_says_why(world_of_one: None) -> None:
    """And gives back nothing where nothing is under way."""
    spec = SimpleNamespace(returns_routing=False, memory_saver=True)
    fleet: Any = SimpleNamespace(spec=spec, each_own=lambda endpoints, act: {})
    runtime: Any = SimpleNamespace(deadlines=Deadlines.of(RuntimeSettings()), rank=0, is_main=True)
    engine = SGLangEngine(fleet, settings(), runtime)
    request = GenerateRequest((2, 100), seed=0, prompt_id=0)
    with pytest.raises(RuntimeError, match="the engine has no complete set of weights; call update_weights first"):
        engine.submit([request], PARAMS)
    assert engine.abort() == {}
    engine.sleep()
    with pytest.raises(RuntimeError, match="the engine is asleep; call update_weights first"):
        engine.submit([request], PARAMS)
