"""Requests are spread over servers and survive those that die, hang, refuse or lie; those here are stand-ins."""

from __future__ import annotations

import asyncio
import base64
import gc
import importlib.util
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megappo.config.engine import SGLangSettings
from megappo.engines.protocol import Completion, GenerateRequest, Line, SamplingParams
from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.runtime.waiting import wait_until
from megappo.types import RoutingShape

if importlib.util.find_spec("aiohttp") is None:
    pytest.skip("needs launch/requirements-sglang.txt", allow_module_level=True)

from aiohttp import web

from megappo.engines.sglang import dispatch
from megappo.engines.sglang.dispatch import Outcome, Round
from megappo.engines.sglang.line import OpenRound
from megappo.observe.progress import PROGRESS

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
        self.bodies: list[dict[str, Any]] = []
        self.routing: Callable[[int], str] | None = None
        """What it says of the experts of a sample, by the last token of its prompt."""
        self.running = 0
        """Samples that it is making tokens for."""
        self.under_way = self.most_under_way = 0
        """Requests at a time."""
        self._ready = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()
        assert self._ready.wait(10)

    def _serve(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        app = web.Application()
        app.router.add_post("/generate", self._generate)
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
        await asyncio.sleep(self.seconds * len(body["input_ids"]))
        self.under_way -= 1
        self.running -= len(body["input_ids"])
        if self.status != 200:
            return web.Response(status=self.status, text="because")
        if self.page is not None:
            return web.Response(text=self.page, content_type="text/html")
        self.answered_at.append(time.monotonic())
        texts = [self._text(ids) for ids in body["input_ids"]]
        if body["return_routed_experts"] and self.routing is not None:
            for ids, text in zip(body["input_ids"], texts, strict=True):
                text["meta_info"]["routed_experts"] = self.routing(ids[-1])
        return web.json_response(texts)

    def _text(self, ids: list[int]) -> dict[str, Any]:
        return {
            "output_ids": [ids[-1], 1],
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": 1},
                "weight_version": self.version,
                "output_token_logprobs": [[-0.5, ids[-1], None], [-0.25, 1, None]],
            },
        }


def settings(**changes: Any) -> SGLangSettings:
    return SGLangSettings(**({"stall_timeout_seconds": 0.5, "health_timeout_seconds": 1.0} | changes))


def spread(servers: list[StandIn], count: int = 200, params: SamplingParams = PARAMS, **changes: Any) -> Outcome:
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(count)}
    return Round([s.endpoint for s in servers], requests, params, 7, settings(**changes)).result()


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


def test_samples_and_tokens_are_counted() -> None:
    seen: list[str] = []
    PROGRESS.enter("rollout")
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(9)}
    servers = [StandIn(0, 0.01).endpoint]
    on_tokens = lambda: seen.append(PROGRESS.text())  # noqa: E731 - asked just before the answers are counted
    sent = Round(servers, requests, PARAMS, 7, settings(max_inflight_sequences=3), on_tokens)
    assert "0 of 9 samples of this rank" in PROGRESS.text()
    assert complete(sent.result(), 9)
    seen.append(PROGRESS.text())
    PROGRESS.leave()
    counts = [int(text.split(": ")[1].split(" of 9 samples")[0]) for text in seen]
    assert counts == sorted(set(counts)) and counts[0] == 0 and counts[-1] == 9 and len(counts) > 3
    assert "tokens/s" in seen[-1]


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
        assert len(Round([s.endpoint for s in servers], requests, PARAMS, 7, settings()).result().completions) == 8
    assert [server.asked for server in servers] == [16] * 8
    prompts = [{(ids[-1] - 100) // 2 for body in server.bodies for ids in body["input_ids"]} for server in servers]
    assert [len(found) for found in prompts] == [8] * 8  # both samples of each


def test_a_dead_engine_gives_its_work_to_the_others() -> None:
    well, dying = StandIn(0, 0.002), StandIn(1, 0.002)
    dying.fail_after = 30
    outcome = spread([well, dying])
    assert complete(outcome)
    assert list(outcome.failures) == [1] and "broke off while it generated" in outcome.failures[1]


def test_a_hung_engine_is_asked_for_its_health_first() -> None:
    well, hanging = StandIn(0), StandIn(1)
    hanging.hang_after, hanging.healthy = 20, False
    started = time.monotonic()
    outcome = spread([well, hanging])
    assert complete(outcome)
    assert list(outcome.failures) == [1] and "is not well" in outcome.failures[1]
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
    assert "gave no response within 1 seconds and works on none" in outcome.failures[0]


def test_no_deadline_ends_a_request_that_tokens_are_made_for() -> None:
    slow = StandIn(0, 0.6)
    told: list[float] = []
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(5)}
    patient = settings(request_timeout_seconds=0.5, stall_timeout_seconds=60.0)
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


def test_what_is_no_answer_is_a_failed_server() -> None:
    """A proxy's page, say, with a status that promises an answer."""
    page, well = StandIn(0), StandIn(1)
    page.page = "<html>please wait</html>"
    outcome = spread([page, well])
    assert complete(outcome)
    assert "answered what is no JSON: b'<html>please wait</html>'" in outcome.failures[0]


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
    assert refusal is not None and "refused to generate: because" in refusal


def test_a_round_can_be_given_up() -> None:
    server = StandIn(0)
    server.hang_after = 0
    requests = {0: GenerateRequest((2, 3), seed=0, prompt_id=0)}
    round_ = Round([server.endpoint], requests, PARAMS, 7, settings(stall_timeout_seconds=60.0))
    started = time.monotonic()
    round_.cancel()
    assert time.monotonic() - started < 5


class AskedLater:
    """Asked to stop once there is an answer."""

    def __init__(self, server: StandIn) -> None:
        self.server = server

    @property
    def asked(self) -> bool:
        return bool(self.server.answered_at)

    def check(self) -> None:
        raise AssertionError("the round leaves that to its caller")


def test_a_run_that_is_asked_to_stop_takes_what_has_come() -> None:
    server = StandIn(0)
    server.hang_after = 40
    requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(200)}
    round_ = Round([server.endpoint], requests, PARAMS, 7, settings(stall_timeout_seconds=60.0))
    started = time.monotonic()
    outcome = round_.result(AskedLater(server))
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
    assert "gave no experts for each of 3 x 1 x 1 places" in outcome.failures[0]


class Chats:
    """So many chats of three turns each, all at the same time: the next is asked for once one is answered."""

    def __init__(self, count: int) -> None:
        self.waiting = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in range(count)}
        self.turns: dict[int, list[tuple[int, ...]]] = {i: [] for i in range(count)}
        self.ended_at: dict[int, float] = {}
        self._line: OpenRound | None = None

    def drive(self, line: Line) -> int:
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
            self.ended_at[number] = time.monotonic()


def chat(servers: list[StandIn], count: int = 40, **changes: Any) -> tuple[Chats, int, Outcome]:
    """What came of it, the requests that are left, and which servers failed."""
    chats = Chats(count)
    line = OpenRound([s.endpoint for s in servers], chats, PARAMS, 7, settings(**changes))
    try:
        left = chats.drive(line)
    finally:
        outcome = line.hang_up()
    return chats, left, outcome


def test_turns_are_answered_while_others_come() -> None:
    """Each alone, all of an episode by one server; who is slow holds nobody up."""
    fast, slow = StandIn(0, 0.001), StandIn(1, 0.3)
    begun = time.monotonic()
    chats, left, outcome = chat([fast, slow], max_inflight_sequences=64)
    assert left == 0 and not outcome.failures
    assert all(turns == [(100 + i, 1)] * 3 for i, turns in chats.turns.items())
    assert all(len(body["input_ids"]) == 1 for server in (fast, slow) for body in server.bodies)
    by_server = [{body["input_ids"][0][1] for body in server.bodies} for server in (fast, slow)]
    assert not by_server[0] & by_server[1]
    assert max(chats.ended_at[prompt - 100] for prompt in by_server[0]) - begun < 0.3


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
    line = OpenRound([again.endpoint], chats, PARAMS, 7, settings())
    assert chats.drive(line) == 0  # what is left is asked again
    line.hang_up()
    assert all(turns == [(100 + i, 1)] * 3 for i, turns in chats.turns.items())


def test_a_refused_turn_ends_the_round() -> None:
    server = StandIn(0)
    server.status = 400
    _, left, outcome = chat([server])
    assert left == 40 and "refused to generate" in str(outcome.refusal)
