"""Requests are distributed over servers and survive failed, hanging and incorrect servers.

The servers of these tests are stand-ins.
"""

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
    """A configurable server that answers /generate and counts the requested samples."""

    def __init__(self, index: int, seconds: float = 0.0) -> None:
        self.index, self.seconds, self.requested_samples = index, seconds, 0
        self.version, self.status, self.healthy = "7", 200, True
        self.health_seconds = 0.0
        self.answered_at: list[float] = []
        self.fail_after: int | None = None
        """Number of requested samples after which the server breaks the connection."""
        self.hang_after: int | None = None
        self.page: str | None = None
        """HTML page that the server returns instead of an answer."""
        self.logprob: float | None = -0.5
        """Log-probability of the first token of each answer."""
        self.bodies: list[dict[str, Any]] = []
        self.routing: Callable[[int], str] | None = None
        """Function that returns the experts of a sample from the last token of the prompt."""
        self.cached_tokens: Callable[[list[int]], int] = lambda ids: 0
        """Function that returns the number of prompt tokens in the prefix cache."""
        self.running = 0
        """Number of samples in generation."""
        self.under_way = self.most_under_way = 0
        """Number of concurrent requests."""
        self.aborts = 0
        self.ends_on_abort: set[asyncio.Event] = set()
        """Events of the requests in progress."""
        self.spans: list[dict[str, Any]] | None = None
        """Weight version of each span of tokens."""
        self.finish = "stop"
        """Finish reason of each answer."""
        self.begins = True
        """Whether an aborted request has generated a token."""
        self.may_answer: Callable[[], bool] = lambda: True
        """Function that returns whether the server may answer."""
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
        self.requested_samples += len(body["input_ids"])
        if self.fail_after is not None and self.requested_samples > self.fail_after:
            assert request.transport is not None
            request.transport.abort()
        if self.hang_after is not None and self.requested_samples > self.hang_after:
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
        """Return the answer of SGLang to an aborted request. Unstarted requests have no log-probabilities."""
        meta: dict[str, Any] = {"finish_reason": {"type": "abort"}, "weight_version": self.version}
        if not self.begins:
            return {"output_ids": [], "meta_info": meta}
        return {"output_ids": [ids[-1]], "meta_info": meta | {"output_token_logprobs": [[-0.5, ids[-1], None]]}}


def settings(**changes: Any) -> SGLangSettings:
    return SGLangSettings(**({"stall_timeout_seconds": 0.5, "health_timeout_seconds": 1.0} | changes))


def limits(**changes: Any) -> RoundLimits:
    """Return the limits of `settings`, with the request timeout of the settings."""
    engine_settings = settings(**changes)
    request_seconds = engine_settings.request_timeout_seconds or LEAST_REQUEST_SECONDS
    return RoundLimits.of(engine_settings, replace(Deadlines.of(RuntimeSettings()), request_seconds=request_seconds))


def spread(servers: list[StandIn], count: int = 200, params: SamplingParams = PARAMS, **changes: Any) -> Outcome:
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(count)}
    return Round([s.endpoint for s in servers], requests, params, 7, limits(**changes)).result()


def complete(outcome: Outcome, count: int = 200) -> bool:
    """Return whether each request has exactly one answer."""
    return (
        all(outcome.completions[i].token_ids == (100 + i, 1) for i in range(count))
        and len(outcome.completions) == count
    )


def test_work_follows_speed() -> None:
    fast, slow = StandIn(0, 0.001), StandIn(1, 0.02)
    outcome = spread([fast, slow], max_inflight_sequences=16)
    assert complete(outcome) and not outcome.failures
    assert fast.requested_samples + slow.requested_samples == 200
    assert fast.requested_samples > 2 * slow.requested_samples > 0
    assert outcome.completions[3].logprobs == (-0.5, -0.25)
    sampling = fast.bodies[0]["sampling_params"][0]
    assert sampling["temperature"] == 0.5 and sampling["stop_token_ids"] == [1] and "sampling_seed" in sampling


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, (1, 1.0)), (0.5, (-1, 1e-9))])
def test_greedy_requests_keep_the_scale_of_logprobs(temperature: float, expected: tuple[int, float]) -> None:
    """SGLang returns log-probabilities of the unscaled distribution for greedy sampling. At temperature 1 the two
    distributions are equal."""
    server = StandIn(0)
    spread([server], 1, replace(PARAMS, temperature=temperature, greedy=True))
    (sampling,) = server.bodies[0]["sampling_params"]
    assert (sampling["top_k"], sampling["top_p"]) == expected
    assert sampling["temperature"] == temperature


def test_samples_and_tokens_are_counted() -> None:
    seen: list[str] = []
    PROGRESS.enter("rollout")
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(9)}
    servers = [StandIn(0, 0.01).endpoint]
    on_tokens = lambda: seen.append(PROGRESS.text())  # noqa: E731 - called before the answers are counted
    sent = Round(servers, requests, PARAMS, 7, limits(max_inflight_sequences=3), on_tokens)
    assert "0 of 9 samples of this rank" in PROGRESS.text()
    assert complete(sent.result(), 9)
    seen.append(PROGRESS.text())
    PROGRESS.leave()
    counts = [int(text.split(": ")[1].split(" of 9 samples")[0]) for text in seen]
    assert counts == sorted(set(counts)) and counts[0] == 0 and counts[-1] == 9 and len(counts) > 3
    assert "tokens/s" in seen[-1]
    assert all("1 of 1 servers busy" in text for text in seen[:-1]) and "busy" not in seen[-1]


def test_all_requests_are_sent_at_once() -> None:
    """Requests are sent in groups of at most 32 samples. The groups shrink towards the end and respect the limit of a
    server."""
    server = StandIn(0, 0.05)
    assert complete(spread([server], 200))
    sizes = [len(body["input_ids"]) for body in server.bodies]
    assert max(sizes) == 32 and sizes[-1] == 1
    assert server.most_under_way == len(sizes)
    limited = StandIn(0, 0.02)
    assert complete(spread([limited], 40, max_inflight_sequences=3), 40)
    assert max(len(body["input_ids"]) for body in limited.bodies) == 3


def test_ranks_with_few_prompts_balance_engines() -> None:
    """Sixteen ranks send four prompts of two samples each to eight servers."""
    servers = [StandIn(i) for i in range(8)]
    for rank in range(16):
        numbers = range(8 * rank, 8 * rank + 8)
        requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i // 2) for i in numbers}
        assert len(Round([s.endpoint for s in servers], requests, PARAMS, 7, limits()).result().completions) == 8
    assert [server.requested_samples for server in servers] == [16] * 8
    prompts = [{(ids[-1] - 100) // 2 for body in server.bodies for ids in body["input_ids"]} for server in servers]
    assert [len(server_prompts) for server_prompts in prompts] == [8] * 8  # both samples of each prompt


def test_dead_engine_moves_its_work_to_others() -> None:
    well, dying = StandIn(0, 0.002), StandIn(1, 0.002)
    dying.fail_after = 30
    outcome = spread([well, dying])
    assert complete(outcome)
    assert list(outcome.failures) == [1] and "closed the connection during generation" in outcome.failures[1]


def test_hung_engine_fails_after_a_health_check() -> None:
    well, hanging = StandIn(0), StandIn(1)
    hanging.hang_after, hanging.healthy = 20, False
    started = time.monotonic()
    outcome = spread([well, hanging])
    assert complete(outcome)
    assert list(outcome.failures) == [1] and "failed its health check" in outcome.failures[1]
    assert time.monotonic() - started < 10


def test_engines_continue_during_a_health_check() -> None:
    well, hanging = StandIn(0, 0.01), StandIn(1)
    hanging.hang_after, hanging.health_seconds = 0, 60.0
    outcome = spread([well, hanging], max_inflight_sequences=4, health_timeout_seconds=3.0)
    assert complete(outcome) and list(outcome.failures) == [1]
    pauses = [later - earlier for earlier, later in zip(well.answered_at, well.answered_at[1:], strict=False)]
    assert max(pauses[:40]) < 1.5  # 196 samples in groups of at most four, during the health check of the other engine


def test_slow_healthy_engine_does_not_fail() -> None:
    slow = StandIn(0, 0.2)
    outcome = spread([slow], 20)
    assert complete(outcome, 20) and not outcome.failures


def test_request_without_progress_has_a_deadline() -> None:
    """The server is healthy but has no request in progress."""
    lost = StandIn(0)
    lost.hang_after = 0
    outcome = spread([lost], 5, request_timeout_seconds=1.0)
    assert outcome.completions == {}
    assert "returned no response within 1 seconds and has no request in progress" in outcome.failures[0]


def test_request_in_generation_has_no_deadline() -> None:
    slow = StandIn(0, 0.6)
    progress_times: list[float] = []
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(5)}
    patient = limits(request_timeout_seconds=0.5, stall_timeout_seconds=60.0)
    outcome = Round(
        [slow.endpoint], requests, PARAMS, 7, patient, lambda: progress_times.append(time.monotonic())
    ).result()
    assert complete(outcome, 5) and not outcome.failures
    assert len(progress_times) >= 3  # progress was reported during the rollout


def test_requests_remain_without_engines() -> None:
    outcome = spread([], 5)
    assert outcome.completions == {}


def test_answers_of_other_weights_are_rejected() -> None:
    well, old = StandIn(0), StandIn(1)
    old.version = "6"
    outcome = spread([well, old])
    assert complete(outcome)
    assert "generated with weights ['6'], not 7" in outcome.failures[1]


def test_null_logprobs_are_read_as_nan() -> None:
    """SGLang writes null for them; who trains on the answers refuses them."""
    server = StandIn(0)
    server.logprob = None
    answer = spread([server], 1).completions[0]
    assert math.isnan(answer.logprobs[0]) and answer.logprobs[1] == -0.25


def test_invalid_json_fails_the_server() -> None:
    """A proxy can return an HTML page with the status 200."""
    page, well = StandIn(0), StandIn(1)
    page.page = "<html>please wait</html>"
    outcome = spread([page, well])
    assert complete(outcome)
    assert "returned invalid JSON: b'<html>please wait</html>'" in outcome.failures[0]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ('{"detail": "ok"}', "returned a response that is not a list of answers"),
        ('[{"text": "ok"}]', "returned a response that is not a list of answers (KeyError('meta_info')): b'[{"),
        ("[[1], [2]]", "returned a response that is not a list of answers"),
        ("[]", "returned 0 answers to"),
    ],
)
def test_unknown_response_format_fails_the_server(response: str, message: str) -> None:
    """Servers of other versions can use a different format. Other servers then answer the requests."""
    strange, well = StandIn(0), StandIn(1)
    strange.page = response
    outcome = spread([strange, well])
    assert complete(outcome)
    assert message in outcome.failures[0]


def test_answers_are_read_without_the_garbage_collector() -> None:
    """The garbage collector is restored to the previous state afterwards."""
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


def test_rejected_request_stops_the_run() -> None:
    server = StandIn(0)
    server.status = 400
    refusal = spread([server]).refusal
    assert refusal is not None and "rejected a generation request: because" in refusal


def test_repeated_failures_of_all_servers_end_the_run(world_of_one: None) -> None:
    """Failures do not count if another request is answered. Failures of separate rounds do not count either."""
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


def test_round_can_be_cancelled() -> None:
    server = StandIn(0)
    server.hang_after = 0
    requests = {0: GenerateRequest((2, 3), seed=0, prompt_id=0)}
    round_ = Round([server.endpoint], requests, PARAMS, 7, limits(stall_timeout_seconds=60.0))
    started = time.monotonic()
    round_.cancel()
    assert time.monotonic() - started < 5


class StopRequest:
    """Stop request that becomes active once a round has read an answer. On busy cores the round reads later than the
    server answers."""

    requested = False

    def request(self) -> None:
        self.requested = True

    def check(self) -> None:
        raise AssertionError("the round must not check for the stop")


def test_stop_request_keeps_completed_answers() -> None:
    server = StandIn(0)
    server.hang_after = 40
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(200)}
    stop = StopRequest()
    round_ = Round([server.endpoint], requests, PARAMS, 7, limits(stall_timeout_seconds=60.0), stop.request)
    started = time.monotonic()
    outcome = round_.result(stop)
    assert time.monotonic() - started < 20
    assert 0 < len(outcome.completions) < 200 and not outcome.failures
    assert all(outcome.completions[i].token_ids == (100 + i, 1) for i in outcome.completions)


@contextmanager
def silent_port() -> Iterator[str]:
    """Yield the URL of a socket that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_every_control_request_has_a_deadline() -> None:
    with silent_port() as url, pytest.raises(ServerFailure, match="did not answer /x within 0.5 seconds"):
        call(Endpoint(0, url, "", 0), "/x", timeout_seconds=0.5)
    with pytest.raises(ServerFailure, match="cannot be reached for /x"):
        call(Endpoint(0, "http://127.0.0.1:9", "", 0), "/x", timeout_seconds=0.5)


def test_routing_is_requested_and_read() -> None:
    """Routing is stored in the smallest integer type that fits. Invalid expert numbers stay invalid. Each request has
    one sample."""
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
        expert_numbers = outcome.completions[i].routing
        assert expert_numbers is not None and expert_numbers.dtype == torch.uint8
        assert expert_numbers.tolist() == [[[0, 1], [2, 3]], [[199, i], [255, 7]], [[255, 5], [6, 8]]]


@pytest.mark.parametrize("encoded", [None, "", "AAAA", "AAAAAAAA"])
def test_server_without_routing_fails(encoded: str | None) -> None:
    server = StandIn(0)
    server.routing = None if encoded is None else lambda _: str(encoded)
    outcome = spread([server], 2, replace(PARAMS, routing=RoutingShape(1, 1, 4)))
    assert not outcome.completions
    assert "did not return the experts of all 3 x 1 x 1 positions" in outcome.failures[0]


class Chats:
    """Concurrent chats of three turns each. A turn is requested once the previous turn is answered."""

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
    """Return the chats, the number of remaining requests, and the outcome."""
    chats = Chats(count)
    return chats, *drive(servers, chats, **changes)


def drive(servers: list[StandIn], chats: Chats, **changes: Any) -> tuple[int, Outcome]:
    """Run the chats with these servers, and return the number of remaining requests and the outcome."""
    line = OpenRound([s.endpoint for s in servers], chats, PARAMS, 7, limits(**changes))
    try:
        left = chats.drive(line)
    finally:
        outcome = line.hang_up()
    return left, outcome


def test_turns_are_answered_while_others_arrive() -> None:
    """Each turn is a separate request, and one server answers all turns of an episode. A slow server does not delay
    other servers."""
    fast, slow, chats = StandIn(0), StandIn(1), Chats(40)
    slow.may_answer = lambda: len(chats.ended) >= 10  # chats that end on the fast server
    left, outcome = drive([fast, slow], chats, max_inflight_sequences=64)
    assert left == 0 and not outcome.failures
    assert all(turns == [(100 + i, 1)] * 3 for i, turns in chats.turns.items())
    assert all(len(body["input_ids"]) == 1 for server in (fast, slow) for body in server.bodies)
    by_server = [{body["input_ids"][0][1] for body in server.bodies} for server in (fast, slow)]
    assert not by_server[0] & by_server[1]
    assert {prompt + 100 for prompt in chats.ended[:10]} <= by_server[0]


def test_turns_stay_with_their_server_after_failure() -> None:
    """Other servers answer the remaining turns of the failed server. One server answers all remaining turns of an
    episode."""
    servers = [StandIn(i, 0.005) for i in range(4)]
    servers[1].fail_after = 5
    chats, left, outcome = chat(servers)
    assert left == 0 and outcome.failures.keys() == {1}
    assert all(turns == [(100 + i, 1)] * 3 for i, turns in chats.turns.items())
    fine = [server for server in servers if server.index != 1]
    served = [Counter(body["input_ids"][0][1] - 100 for body in server.bodies) for server in fine]
    assert all(not a & b for a, b in itertools.combinations(served, 2))
    assert all(served[fine.index(servers[i % 4])][i] == 3 for i in range(40) if i % 4 != 1)


def test_continued_prompts_stay_with_their_server() -> None:
    """The server of a prompt does not depend on the lengths or on other prompts with the same number."""
    servers, homes = [StandIn(i) for i in range(3)], Homes()

    def servers_of(prompts: dict[int, tuple[int, ...]]) -> dict[int, int]:
        """Request two samples of each prompt, and return the server of each prompt."""
        for server in servers:
            server.bodies.clear()
        requests = {2 * p + s: GenerateRequest((*ids, 100 + p), s, p) for p, ids in prompts.items() for s in (0, 1)}
        endpoints = [server.endpoint for server in servers]
        outcome = Round(endpoints, requests, PARAMS, 7, limits(), homes=homes).result()
        assert len(outcome.completions) == 2 * len(prompts)
        assignments = [(ids[-1] - 100, s.index) for s in servers for body in s.bodies for ids in body["input_ids"]]
        assert len(set(assignments)) == len(prompts), "all samples of a prompt must use one server"
        return dict(assignments)

    first = servers_of({p: (2, p) for p in range(12)})
    assert Counter(first.values()) == {0: 4, 1: 4, 2: 4}
    longer = {p: (2, p, 100 + p, *[5] * (7 * p % 31)) for p in range(1, 12, 2)}
    assert servers_of(longer) == {p: first[p] for p in longer}
    others = servers_of({p: (3, p, *[5] * (11 * p % 31)) for p in range(12)})
    assert Counter(others.values()) == {0: 4, 1: 4, 2: 4} and others != first
    homes.forget()
    assert servers_of({p: (2, p) for p in range(12)}) == first


@pytest.mark.parametrize("continued", [False, True])
def test_longest_prompts_are_sent_first(continued: bool) -> None:
    """The order also applies to prompts that stay with the server of their prefixes."""
    server, homes = StandIn(0), Homes()
    begun = {p: GenerateRequest((2, 100 + p), p, p) for p in range(5)}
    if continued:
        assert len(Round([server.endpoint], begun, PARAMS, 7, limits(), homes=homes).result().completions) == 5
        server.bodies.clear()
    longer = {p: replace(begun[p], token_ids=(2, 100 + p, *[5] * (3 * p % 5))) for p in begun}
    one_by_one = limits(max_inflight_sequences=1)
    assert len(Round([server.endpoint], longer, PARAMS, 7, one_by_one, homes=homes).result().completions) == 5
    assert [len(ids) for body in server.bodies for ids in body["input_ids"]] == [6, 5, 4, 3, 2]


def test_prefix_cache_hits_are_counted_by_server() -> None:
    """The count includes answers of a server before a failure."""
    servers = [StandIn(0), StandIn(1)]
    servers[1].cached_tokens = lambda ids: len(ids) - 1
    outcome = spread(servers, 40)
    assert complete(outcome, 40) and not outcome.failures
    assert outcome.cache == {0: CacheUse(40, 0), 1: CacheUse(40, 20)}
    servers[1].fail_after = servers[1].requested_samples
    _, left, outcome = chat(servers, 4)
    assert left == 0
    assert outcome.cache == {0: CacheUse(sum(range(2, 5)) * 4, 0)}


def test_turns_of_a_lost_server_move_or_remain() -> None:
    fine, broken = StandIn(0), StandIn(1)
    broken.fail_after = 10
    chats, left, outcome = chat([fine, broken])
    assert left == 0 and outcome.failures.keys() == {1}
    assert all(turns == [(100 + i, 1)] * 3 for i, turns in chats.turns.items())
    fine.fail_after = fine.requested_samples + 10
    chats, left, outcome = chat([fine, broken])
    assert left == len(chats.waiting) > 0 and outcome.failures.keys() == {0, 1}
    again = StandIn(2)
    line = OpenRound([again.endpoint], chats, PARAMS, 7, limits())
    assert chats.drive(line) == 0  # the remaining requests are sent again
    line.hang_up()
    assert all(turns == [(100 + i, 1)] * 3 for i, turns in chats.turns.items())


def test_rejected_turn_ends_the_round() -> None:
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
    completions: dict[int, Completion] = {}
    assert wait_until(lambda: len(completions.update(line.take(0.01)) or completions) >= count, 20.0, every_seconds=0.0)
    return completions


def test_answers_are_read_early_and_the_rest_aborted(world_of_one: None) -> None:
    """Aborted requests are in generation, not started by the server, or not sent."""
    fast, slow, full = StandIn(0, 0.001), StandIn(1, 30.0), StandIn(2, 30.0)
    full.begins = False
    line = in_flight([fast, slow, full], 30, max_inflight_sequences=4)
    completions = taken(line, 22)  # all except the requests in progress on the other servers
    assert all(completions[i] == Completion((100 + i, 1), (-0.5, -0.25), False, 7) for i in range(0, 30, 3))
    assert wait_until(lambda: slow.running == full.running == 4, 10.0, every_seconds=0.01) and line.take(0.0) == {}
    line.break_off()
    line.send(30, GenerateRequest((2, 130), seed=30, prompt_id=30))
    assert abort_servers(line, [s.endpoint for s in (fast, slow, full)], settings()) == {}
    assert fast.aborts == slow.aborts == full.aborts >= 2
    rest, outcome = line.end()
    assert (
        not outcome.failures
        and rest.keys() | completions.keys() == set(range(31))
        and not rest.keys() & completions.keys()
    )
    assert all(answer.broken_off and not answer.truncated and answer.weight_version == 7 for answer in rest.values())
    begun = {i: answer.token_ids for i, answer in rest.items() if answer.token_ids}
    assert len(begun) == 4 and all(tokens == (100 + i,) and i % 3 == 1 for i, tokens in begun.items())


@pytest.mark.parametrize("listens", [False, True])
def test_long_round_releases_answered_requests(world_of_one: None, listens: bool) -> None:
    server, recorder = StandIn(0, 0.001), RecordingListener()
    line = InFlightRound([server.endpoint], PARAMS, 7, limits(), listener=recorder if listens else None)
    requests = []
    for i in range(20):
        request = GenerateRequest((2, 100 + i), seed=i, prompt_id=i)
        requests.append(weakref.ref(request))
        line.send(i, request)
    del request
    if listens:
        assert wait_until(lambda: len(recorder.answers) == 20, 20.0, every_seconds=0.01)
    else:
        taken(line, 20)
    assert wait_until(lambda: gc.collect() >= 0 and not any(one() for one in requests), 20.0, every_seconds=0.01)
    line.end()


class RecordingListener:
    """A `Listener` that records the answers."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Completion]] = []

    def answered(self, number: int, completion: Completion) -> None:
        self.answers.append((number, completion))


def test_turns_in_flight_reach_the_listener(world_of_one: None) -> None:
    """The listener also receives aborted turns. Turns are delayed while servers are restarted."""
    server, recorder, departures = StandIn(0, 0.001), RecordingListener(), Departures()

    def send(number: int, last: int) -> None:
        request = GenerateRequest((2, last), seed=number, prompt_id=number)
        departures.send(
            {number: request}, lambda: InFlightRound([server.endpoint], PARAMS, 7, limits(), listener=recorder)
        )

    with departures.kept_back():
        send(3, 100)
        assert departures.stream is None
    assert wait_until(lambda: len(recorder.answers) == 1, 10.0, every_seconds=0.01)
    send(3, 101)  # the next turn has the same number
    assert wait_until(lambda: len(recorder.answers) == 2, 10.0, every_seconds=0.01)
    assert [(n, c.token_ids[0], c.broken_off) for n, c in recorder.answers] == [(3, 100, False), (3, 101, False)]
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
    assert recorder.answers[2:] == [(4, replace(recorder.answers[2][1], broken_off=True))]


def test_server_without_an_abort_response_fails(world_of_one: None) -> None:
    hanging = StandIn(0, 30.0)
    line = in_flight([hanging], 3, sync_timeout_seconds=0.3, stall_timeout_seconds=60.0)
    assert wait_until(lambda: hanging.running == 3, 10.0, every_seconds=0.01)
    line.break_off()
    failed = abort_servers(line, [], settings(sync_timeout_seconds=0.3))  # the server receives no abort
    assert failed.keys() == {0} and "did not return its requests after an abort" in failed[0]
    rest, _ = line.end()
    assert rest.keys() == {0, 1, 2} and not any(answer.token_ids for answer in rest.values())


def test_abort_ends_immediately_after_a_rejection(world_of_one: None) -> None:
    """The rejected request and the requests of other servers have no answer. The rejection ends the run once the
    outcome is read."""
    refusing, slow = StandIn(0, 0.01), StandIn(1, 30.0)
    refusing.status = 400
    line = in_flight([refusing, slow], 6, sync_timeout_seconds=60.0)
    assert wait_until(lambda: line.is_over, 10.0, every_seconds=0.01)
    assert "rejected a generation request: because" in str(line.refusal)
    line.break_off()
    engine_settings = settings(sync_timeout_seconds=9.0, health_timeout_seconds=30.0)
    assert abort_servers(line, [refusing.endpoint, slow.endpoint], engine_settings) == {}
    rest, outcome = line.end()
    assert rest.keys() == {*range(6)} and all(answer.broken_off and not answer.token_ids for answer in rest.values())
    assert outcome.refusal and not outcome.failures


def test_rejected_probe_reports_the_reason(world_of_one: None) -> None:
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


def test_response_below_its_length_limit_is_rejected() -> None:
    """SGLang ends a response early if the context or the pool is full, and reports the length limit as the reason."""
    server = StandIn(0)
    server.finish = "length"
    assert "ended a response after 2 of 4 tokens because its context or its pool is full" in str(
        spread([server], 3).refusal
    )
    assert complete(spread([server], 3, replace(PARAMS, max_new_tokens=2)), 3)


def test_paused_servers_do_not_fail(world_of_one: None) -> None:
    """Paused servers may stay silent and unhealthy for longer than other servers. Their answers report the weight
    version of each token."""
    server = StandIn(0, 2.5)
    server.healthy = False
    server.version, server.spans = "8", [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    line = in_flight([server], 3)
    line.hold()
    with line.given(8):
        assert not wait_until(lambda: line.is_over, 2.0, every_seconds=0.1)
        completions = taken(line, 3)
    assert not line.failures
    assert completions[1] == Completion((101, 1), (-0.5, -0.25), False, 7, stretches=((7, 1), (8, 1)))
    line.end()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([("7", 0, 1), ("9", 1, 2)], r"generated with weights \['7', '8', '9'\], not 7 to 8"),
        ([("7", 0, 1), ("8", 1, 3)], "does not report the weight version of each of 2 tokens"),
        ([("7", 0, 1)], "does not report the weight version of each of 2 tokens"),
        ([("7", 0, 0), ("8", 1, 2)], "does not report the weight version of each of 2 tokens"),
    ],
)
def test_reported_weight_versions_are_checked(
    spans: list[tuple[str, int, int]], message: str, world_of_one: None
) -> None:
    server = StandIn(0, 0.2)
    server.version = "8"
    server.spans = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    line = in_flight([server], 1)
    with line.given(8):
        assert wait_until(lambda: line.is_over, 10.0, every_seconds=0.01)
    assert re.search(message, line.failures[0])
    line.end()


def test_unrequested_abort_is_a_failure(world_of_one: None) -> None:
    server = StandIn(0, 30.0)
    line = in_flight([server], 1)
    assert wait_until(lambda: server.running == 1, 10.0, every_seconds=0.01)
    call(server.endpoint, "/abort_request", {"abort_all": True}, timeout_seconds=5)
    assert wait_until(lambda: line.is_over, 10.0, every_seconds=0.01) and "broke a response off" in line.failures[0]
    line.end()


def test_engine_without_weights_reports_the_reason(world_of_one: None) -> None:
    """An abort without requests in progress returns no answers."""
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
