"""Requests are distributed over servers, and their answers are checked and counted.

The servers of these tests are stand-ins.
"""

from __future__ import annotations

import base64
import gc
import importlib.util
import itertools
import json
import math
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megappo.engines.protocol import CacheUse, Completion, GenerateRequest
from megappo.engines.requests import generate
from megappo.observe.terminal.progress import PROGRESS
from megappo.runtime.waiting import wait_until
from megappo.types import RoutingShape

if importlib.util.find_spec("aiohttp") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

from megappo.engines.sglang.requests import generation
from megappo.engines.sglang.requests.dispatch import Dispatcher
from tests.support.stand_in import (
    PARAMS,
    Outcome,
    StandIn,
    complete,
    dispatch,
    dispatcher_of,
    outcome_of,
    requests_of,
    spread,
    submit,
)

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def test_work_follows_speed() -> None:
    fast, slow = StandIn(0, 0.01), StandIn(1, 0.2)
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


def test_samples_and_tokens_are_counted(world_of_one: None) -> None:
    seen: list[str] = []
    PROGRESS.enter("rollout")
    on_tokens = lambda: seen.append(PROGRESS.text())  # noqa: E731 - called before the answers are counted
    with dispatcher_of([StandIn(0, 0.01)], on_tokens, max_inflight_sequences=3) as dispatcher:
        engine: Any = SimpleNamespace(submit=dispatcher.submit, poll=dispatcher.wait)
        assert len(generate(engine, [*requests_of(9).values()], PARAMS)) == 9
        seen.append(PROGRESS.text())
    PROGRESS.leave()
    counts = [int(text.split(": ")[1].split(" of 9 samples of this rank")[0]) for text in seen]
    assert counts == sorted(set(counts)) and counts[0] == 0 and counts[-1] == 9 and len(counts) > 3
    assert "tokens/s" in seen[-1]
    assert all("1 of 1 servers busy" in text for text in seen[:-1]) and "busy" not in seen[-1]


def test_all_requests_are_sent_at_once() -> None:
    """Each request is one call. The calls respect the limit of a server."""
    server = StandIn(0, 0.5)
    assert complete(spread([server], 200))
    assert {len(body["input_ids"]) for body in server.bodies} == {1}
    assert server.most_running == 200
    limited = StandIn(0, 0.02)
    assert complete(spread([limited], 40, max_inflight_sequences=3), 40)
    assert limited.most_running == 3


def test_ranks_with_few_prompts_balance_engines() -> None:
    """Sixteen ranks send four prompts of two samples each to eight servers."""
    servers = [StandIn(i) for i in range(8)]
    for rank in range(16):
        numbers = range(8 * rank, 8 * rank + 8)
        requests = {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i // 2) for i in numbers}
        assert len(dispatch(servers, requests).completions) == 8
    assert [server.requested_samples for server in servers] == [16] * 8
    prompts = [{(ids[-1] - 100) // 2 for body in server.bodies for ids in body["input_ids"]} for server in servers]
    assert [len(server_prompts) for server_prompts in prompts] == [8] * 8  # both samples of each prompt


def test_requests_wait_for_servers() -> None:
    with dispatcher_of([]) as dispatcher:
        futures = submit(dispatcher, requests_of(5))
        assert outcome_of(dispatcher, futures, []).completions == {}
        server = StandIn(0)
        dispatcher.use([server.endpoint], 7)
        assert complete(outcome_of(dispatcher, futures, [server]), 5)


def test_pinned_requests_wait_for_their_server() -> None:
    """Other servers never answer the requests, also without work."""
    servers = [StandIn(i, 0.01) for i in range(3)]
    pinned = {i: replace(request, replica=2 - i % 2) for i, request in requests_of(20).items()}
    with dispatcher_of(servers[:2], max_inflight_sequences=2) as dispatcher:
        futures = submit(dispatcher, pinned)
        assert wait_until(lambda: sum(f.done() for f in futures.values()) == 10, 20.0, every_seconds=0.01)
        servers[2].fail_after = 0
        dispatcher.use([server.endpoint for server in servers], 7)
        outcome = outcome_of(dispatcher, futures, servers[2:])
        assert outcome.failures.keys() == {2} and len(outcome.completions) == 10
        servers[2].fail_after = None
        dispatcher.use([server.endpoint for server in servers], 7)
        assert all(future.result(20.0).token_ids == (100 + i, 1) for i, future in futures.items())
    assert servers[0].requested_samples == 0 and servers[1].requested_samples == 10


def test_null_logprobs_are_read_as_nan() -> None:
    """SGLang writes null for them; who trains on the answers refuses them."""
    server = StandIn(0)
    server.logprob = None
    answer = spread([server], 1).completions[0]
    assert math.isnan(answer.logprobs[0]) and answer.logprobs[1] == -0.25


def test_answers_are_read_without_the_garbage_collector() -> None:
    """The garbage collector is restored to the previous state afterwards."""
    collecting: list[bool] = []
    loads = json.loads

    def read(content: bytes) -> Any:
        collecting.append(gc.isenabled())
        return loads(content)

    with mock.patch.object(generation, "json", SimpleNamespace(loads=read)):
        assert complete(spread([StandIn(0)], 40), 40)
        assert len(collecting) == 40 and not any(collecting) and gc.isenabled()
        gc.disable()
        try:
            assert complete(spread([StandIn(0)], 40), 40) and not gc.isenabled()
        finally:
            gc.enable()


def test_routing_is_requested_and_read() -> None:
    """Routing is stored in the smallest integer type that fits. Invalid expert numbers stay invalid."""
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


class Chats:
    """Concurrent chats of three turns each. A turn is requested once the previous turn is answered."""

    def __init__(self, count: int) -> None:
        self.waiting = {
            i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i, conversation=1000 + i) for i in range(count)
        }
        self.turns: dict[int, list[tuple[int, ...]]] = {i: [] for i in range(count)}
        self.ended: list[int] = []

    def begin(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        for number in list(self.waiting):
            self._request(number)

    def _request(self, number: int) -> None:
        (future,) = self._dispatcher.submit([self.waiting[number]], PARAMS)
        future.add_done_callback(partial(self._receive, number))

    def _receive(self, number: int, answer: Future[Completion]) -> None:
        request = self.waiting.pop(number)
        self.turns[number].append(answer.result().token_ids)
        if len(self.turns[number]) < 3:
            self.waiting[number] = replace(request, token_ids=(*request.token_ids, 100 + number))
            self._request(number)
        else:
            self.ended.append(number)

    @property
    def complete(self) -> bool:
        return not self.waiting and all(turns == [(100 + i, 1)] * 3 for i, turns in self.turns.items())


def chat(servers: Sequence[StandIn], chats: Chats, **changes: Any) -> Outcome:
    """Run the chats with these servers until a server is needed."""
    with dispatcher_of(servers, **changes) as dispatcher:
        chats.begin(dispatcher)
        return outcome_of(dispatcher, {}, servers)


def test_turns_are_answered_while_others_arrive() -> None:
    """Each turn is a separate request, and one server answers all turns of an episode. A slow server does not delay
    other servers."""
    fast, slow, chats = StandIn(0), StandIn(1), Chats(40)
    slow.may_answer = lambda: len(chats.ended) >= 10  # chats that end on the fast server
    outcome = chat([fast, slow], chats, max_inflight_sequences=64)
    assert chats.complete and not outcome.failures
    assert all(len(body["input_ids"]) == 1 for server in (fast, slow) for body in server.bodies)
    by_server = [{body["input_ids"][0][1] for body in server.bodies} for server in (fast, slow)]
    assert not by_server[0] & by_server[1]
    assert {prompt + 100 for prompt in chats.ended[:10]} <= by_server[0]


def test_turns_stay_with_their_server_after_failure() -> None:
    """Other servers answer the remaining turns of the failed server. One server answers all remaining turns of an
    episode."""
    servers, chats = [StandIn(i, 0.005) for i in range(4)], Chats(40)
    servers[1].fail_after = 5
    outcome = chat(servers, chats)
    assert chats.complete and outcome.failures.keys() == {1}
    fine = [server for server in servers if server.index != 1]
    served = [Counter(body["input_ids"][0][1] - 100 for body in server.bodies) for server in fine]
    assert all(not a & b for a, b in itertools.combinations(served, 2))
    assert all(served[fine.index(servers[i % 4])][i] == 3 for i in range(40) if i % 4 != 1)


def test_turns_of_a_lost_server_move_or_remain() -> None:
    fine, broken, chats = StandIn(0), StandIn(1), Chats(40)
    broken.fail_after = 10
    outcome = chat([fine, broken], chats)
    assert chats.complete and outcome.failures.keys() == {1}
    fine.fail_after = fine.requested_samples + 10
    again, chats = StandIn(2), Chats(40)
    with dispatcher_of([fine, broken]) as dispatcher:
        chats.begin(dispatcher)
        outcome = outcome_of(dispatcher, {}, [fine, broken])
        assert outcome.unanswered == len(chats.waiting) > 0 and outcome.failures.keys() == {0, 1}
        dispatcher.use([again.endpoint], 7)  # the remaining requests are sent again
        assert not outcome_of(dispatcher, {}, [again]).failures
    assert chats.complete


def test_continued_prompts_stay_with_their_server() -> None:
    """The server of a prompt does not depend on the lengths or on other prompts with the same number."""
    servers = [StandIn(i) for i in range(3)]

    def servers_of(dispatcher: Dispatcher, prompts: dict[int, tuple[int, ...]]) -> dict[int, int]:
        """Request two samples of each prompt, and return the server of each prompt."""
        for server in servers:
            server.bodies.clear()
        requests = {2 * p + s: GenerateRequest((*ids, 100 + p), s, p) for p, ids in prompts.items() for s in (0, 1)}
        outcome = outcome_of(dispatcher, submit(dispatcher, requests), servers)
        assert len(outcome.completions) == 2 * len(prompts)
        assignments = [(ids[-1] - 100, s.index) for s in servers for body in s.bodies for ids in body["input_ids"]]
        assert len(set(assignments)) == len(prompts), "all samples of a prompt must use one server"
        return dict(assignments)

    with dispatcher_of(servers) as dispatcher:
        first = servers_of(dispatcher, {p: (2, p) for p in range(12)})
        assert Counter(first.values()) == {0: 4, 1: 4, 2: 4}
        longer = {p: (2, p, 100 + p, *[5] * (7 * p % 31)) for p in range(1, 12, 2)}
        assert servers_of(dispatcher, longer) == {p: first[p] for p in longer}
        others = servers_of(dispatcher, {p: (3, p, *[5] * (11 * p % 31)) for p in range(12)})
        assert Counter(others.values()) == {0: 4, 1: 4, 2: 4} and others != first
        for server in servers:
            server.version = "8"
        dispatcher.use([server.endpoint for server in servers], 8)  # new weights invalidate the caches
        assert servers_of(dispatcher, {p: (2, p) for p in range(12)}) == first


@pytest.mark.parametrize("continued", [False, True])
def test_longest_prompts_are_sent_first(continued: bool) -> None:
    """The order also applies to prompts that stay with the server of their prefixes."""
    server = StandIn(0)
    begun = {p: GenerateRequest((2, 100 + p), p, p) for p in range(5)}
    with dispatcher_of([server], max_inflight_sequences=1) as dispatcher:
        if continued:
            assert len(outcome_of(dispatcher, submit(dispatcher, begun), [server]).completions) == 5
            server.bodies.clear()
        longer = {p: replace(begun[p], token_ids=(2, 100 + p, *[5] * (3 * p % 5))) for p in begun}
        assert len(outcome_of(dispatcher, submit(dispatcher, longer), [server]).completions) == 5
    assert [len(ids) for body in server.bodies for ids in body["input_ids"]] == [6, 5, 4, 3, 2]


def test_prefix_cache_hits_are_counted_by_server() -> None:
    """The count includes answers of a server before a failure, but not the answers of probes."""
    servers = [StandIn(0), StandIn(1)]
    servers[1].cached_tokens = lambda ids: len(ids) - 1
    with dispatcher_of(servers) as dispatcher:
        probes = {n: replace(request, replica=n % 2) for n, request in requests_of(6).items()}
        assert len(outcome_of(dispatcher, submit(dispatcher, probes), servers).completions) == 6
        assert [server.requested_samples for server in servers] == [3, 3] and dispatcher.cache == {}
        outcome = outcome_of(dispatcher, submit(dispatcher, requests_of(40)), servers)
        assert complete(outcome, 40) and not outcome.failures
        assert outcome.cache == {0: CacheUse(40, 0), 1: CacheUse(40, 20)}
        servers[1].fail_after = servers[1].requested_samples
        chats = Chats(4)
        chats.begin(dispatcher)
        assert outcome_of(dispatcher, {}, servers).failures.keys() == {1} and chats.complete
        assert dispatcher.cache == {0: CacheUse(40 + sum(range(2, 5)) * 4, 0), 1: CacheUse(40, 20)}


def test_answered_requests_are_released() -> None:
    """A dispatcher lasts for the whole run."""
    server, requests, futures = StandIn(0, 0.001), list[Any](), list[Future[Completion]]()
    with dispatcher_of([server]) as dispatcher:
        for request in requests_of(20).values():
            requests.append(weakref.ref(request))
            futures += dispatcher.submit([request], PARAMS)
        del request
        assert [future.result(20.0).token_ids[0] for future in futures] == [100 + i for i in range(20)]
        assert wait_until(lambda: gc.collect() >= 0 and not any(one() for one in requests), 20.0, every_seconds=0.01)
