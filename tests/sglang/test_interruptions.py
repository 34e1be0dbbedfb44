"""Requests are aborted or kept while servers pause, and continue with their tokens and weight versions.

The servers of these tests are stand-ins.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import pytest

from megappo.engines.protocol import Completion, GenerateRequest
from megappo.engines.requests import RequestTracker, TrackedRequest
from megappo.engines.sglang.client import call
from megappo.runtime.waiting import wait_until

if importlib.util.find_spec("aiohttp") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

from megappo.engines.sglang.requests.aborting import abort_servers
from megappo.engines.sglang.requests.dispatch import Dispatcher
from tests.support.stand_in import (
    PARAMS,
    StandIn,
    StandInEngine,
    dispatcher_of,
    requests_of,
    settings,
    submit,
)

pytestmark = [pytest.mark.slow, pytest.mark.waits, pytest.mark.usefixtures("world_of_one")]

Futures = Mapping[int, Future[Completion]]


def answers_of(futures: Futures) -> dict[int, Completion]:
    """Return the answers so far."""
    return {number: future.result() for number, future in futures.items() if future.done()}


def is_running(server: StandIn, samples: int) -> bool:
    """Wait until the server generates this number of samples."""
    return wait_until(lambda: server.running == samples, 10.0, every_seconds=0.01)


def failure_of(dispatcher: Dispatcher) -> str:
    """Wait for the failure of server 0, and return its reason."""
    assert dispatcher.wait(10.0)
    return dispatcher.report().failures[0]


def test_answers_are_read_early_and_the_rest_aborted() -> None:
    """Aborted requests are in generation, not started by the server, or not sent."""
    fast, slow, full = servers = StandIn(0, 0.001), StandIn(1, 30.0), StandIn(2, 30.0)
    full.begins = False
    with dispatcher_of(servers, max_inflight_sequences=4) as dispatcher:
        futures = submit(dispatcher, requests_of(30))
        # all except the requests in progress on the other servers
        assert wait_until(lambda: len(answers_of(futures)) >= 22, 20.0, every_seconds=0.001)
        assert is_running(slow, 4) and is_running(full, 4)
        completions = answers_of(futures)
        assert len(completions) == 22
        assert all(completions[i] == Completion((100 + i, 1), (-0.5, -0.25), False, 7) for i in range(0, 30, 3))
        dispatcher.abort()
        futures |= submit(dispatcher, requests_of(range(30, 31)))
        assert abort_servers(dispatcher, [server.endpoint for server in servers], settings()) == {}
        assert fast.aborts == slow.aborts == full.aborts >= 2
        dispatcher.end_abort()
        assert all(future.done() for future in futures.values()) and not dispatcher.report().failures
    rest = {i: answer for i, answer in answers_of(futures).items() if i not in completions}
    assert len(rest) == 9
    assert all(answer.broken_off and not answer.truncated and answer.weight_version == 7 for answer in rest.values())
    begun = {i: answer.token_ids for i, answer in rest.items() if answer.token_ids}
    assert len(begun) == 4 and all(tokens == (100 + i,) and i % 3 == 1 for i, tokens in begun.items())


def test_requests_are_sent_again_after_an_abort() -> None:
    """Requests that arrive during an abort are not sent. Servers stay balanced."""
    servers = [StandIn(0, 0.001), StandIn(1, 0.001)]
    with dispatcher_of(servers) as dispatcher:
        for first in (0, 20):
            futures = submit(dispatcher, requests_of(range(first, first + 10)))
            assert wait_until(lambda: len(answers_of(futures)) == 10, 20.0, every_seconds=0.001)  # noqa: B023
            dispatcher.abort()
            (late,) = submit(dispatcher, requests_of(range(first + 10, first + 11))).values()
            assert not dispatcher.wait(0.2) and not dispatcher.busy
            dispatcher.end_abort()
            assert late.result(10.0) == Completion((), (), False, 7, broken_off=True)
    assert [server.requested_samples for server in servers] == [10, 10]


def test_answers_reach_callbacks_at_once() -> None:
    """Callbacks also receive aborted answers. Requests wait while there are no servers."""
    server, answers = StandIn(0, 0.001), list[tuple[int, Completion]]()

    def send(dispatcher: Dispatcher, number: int, last: int) -> None:
        request = GenerateRequest((2, last), seed=number, prompt_id=number, conversation=number)
        (future,) = dispatcher.submit([request], PARAMS)
        future.add_done_callback(lambda answer: answers.append((number, answer.result())))

    with dispatcher_of([]) as dispatcher:
        send(dispatcher, 3, 100)
        assert not dispatcher.wait(0.2) and not answers
        dispatcher.use([server.endpoint], 7)
        assert wait_until(lambda: len(answers) == 1, 10.0, every_seconds=0.01)
        send(dispatcher, 3, 101)  # the next turn of the same conversation
        assert wait_until(lambda: len(answers) == 2, 10.0, every_seconds=0.01)
        assert [(n, c.token_ids[0], c.broken_off) for n, c in answers] == [(3, 100, False), (3, 101, False)]
        server.seconds = 30.0
        send(dispatcher, 4, 102)
        assert is_running(server, 1)
        dispatcher.abort()
        send(dispatcher, 5, 103)
        assert abort_servers(dispatcher, [server.endpoint], settings()) == {}
        assert answers[2:] == [(4, Completion((102,), (-0.5,), False, 7, broken_off=True))]
        dispatcher.end_abort()
        assert answers[3:] == [(5, Completion((), (), False, 7, broken_off=True))]


def test_server_without_an_abort_response_fails() -> None:
    hanging = StandIn(0, 30.0)
    with dispatcher_of([hanging], stall_timeout_seconds=60.0) as dispatcher:
        futures = submit(dispatcher, requests_of(3))
        assert is_running(hanging, 3)
        dispatcher.abort()
        failed = abort_servers(dispatcher, [], settings(sync_timeout_seconds=0.3))  # the server receives no abort
        assert failed.keys() == {0} and "did not return its requests after an abort" in failed[0]
        dispatcher.end_abort()
        assert answers_of(futures).keys() == {0, 1, 2}
        assert all(answer.broken_off and not answer.token_ids for answer in answers_of(futures).values())


def test_abort_ends_immediately_after_a_rejection() -> None:
    """The rejected requests have no tokens. The rejection ends the run once the report is read."""
    refusing, slow = StandIn(0, 0.01), StandIn(1, 30.0)
    refusing.status = 400
    with dispatcher_of([refusing, slow]) as dispatcher:
        futures = submit(dispatcher, requests_of(6))
        assert is_running(slow, 3) and wait_until(lambda: len(dispatcher.busy) == 1, 10.0, every_seconds=0.01)
        assert dispatcher.wait(0.0) and not answers_of(futures)
        dispatcher.abort()
        engine_settings = settings(sync_timeout_seconds=9.0, health_timeout_seconds=30.0)
        assert abort_servers(dispatcher, [refusing.endpoint, slow.endpoint], engine_settings) == {}
        dispatcher.end_abort()
        report, answers = dispatcher.report(), answers_of(futures)
        assert "rejected a generation request: because" in str(report.refusal) and not report.failures
        assert answers.keys() == {*range(6)} and all(answer.broken_off for answer in answers.values())
        assert {i for i, answer in answers.items() if answer.token_ids} == {1, 3, 5}


def test_interrupted_requests_continue_from_their_tokens() -> None:
    """The engine answers interrupted requests with their tokens. The tracker sends them again under the new weights,
    and holds back requests until then."""
    server = StandIn(0, 30.0)
    with closing(StandInEngine([server])) as engine:
        tracker = RequestTracker(engine)
        tracked = [TrackedRequest(request, PARAMS) for request in requests_of(3).values()]
        tracker.submit(tracked[:2])
        assert is_running(server, 2)
        tracker.pause("abort")
        tracker.submit(tracked[2:])
        assert [t.answer and t.answer.token_ids for t in tracked] == [(100,), (101,), None]
        server.seconds = 0.0
        server.bodies.clear()
        engine.poll(0.0)
        assert engine.current == {0} and server.bodies == []
        weights: object = None
        engine.update_weights(weights, 8)  # type: ignore[arg-type]
        tracker.resume()
        engine.poll(20.0)
        answers = [t.future.result() for t in tracked]
    assert sorted(body["input_ids"][0] for body in server.bodies) == [[2, 100, 100], [2, 101, 101], [2, 102]]
    assert [answer.token_ids for answer in answers] == [(100, 100, 1), (101, 101, 1), (102, 1)]
    assert [answer.stretches for answer in answers] == [((7, 1), (8, 2)), ((7, 1), (8, 2)), ()]
    assert [answer.weight_version for answer in answers] == [7, 7, 8]


def test_paused_servers_do_not_fail() -> None:
    """Paused servers may stay silent and unhealthy for longer than other servers. Their answers report the weight
    version of each token."""
    server = StandIn(0, 2.5)
    server.healthy = False
    server.version, server.spans = "8", [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    with dispatcher_of([server]) as dispatcher:
        futures = submit(dispatcher, requests_of(3))
        assert is_running(server, 3)
        dispatcher.hold()
        dispatcher.begin_update(8)
        assert not dispatcher.wait(2.0)
        assert dispatcher.wait(20.0) and not dispatcher.report().failures
        assert answers_of(futures)[1] == Completion((101, 1), (-0.5, -0.25), False, 7, stretches=((7, 1), (8, 1)))


def test_pause_ends_with_the_update() -> None:
    """Later requests share no prefixes with earlier requests. Silent servers fail again."""
    server = StandIn(0)
    with dispatcher_of([server]) as dispatcher:
        assert dispatcher.submit([*requests_of(1).values()], PARAMS)[0].result(10.0).weight_version == 7
        dispatcher.hold()
        dispatcher.begin_update(8)
        server.version = "8"
        dispatcher.use([server.endpoint], 8)
        assert dispatcher.submit([*requests_of(1).values()], PARAMS)[0].result(10.0).weight_version == 8
        server.hang_after, server.healthy = 0, False
        submit(dispatcher, requests_of(1))
        assert "failed its health check" in failure_of(dispatcher)
    assert [body["extra_key"] for body in server.bodies] == [["7"], ["8"], ["8"]]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([("7", 0, 1), ("9", 1, 2)], r"generated with weights \['7', '8', '9'\], not 7 to 8"),
        ([("7", 0, 1), ("8", 1, 3)], "does not report the weight version of each of 2 tokens"),
        ([("7", 0, 1)], "does not report the weight version of each of 2 tokens"),
        ([("7", 0, 0), ("8", 1, 2)], "does not report the weight version of each of 2 tokens"),
    ],
)
def test_reported_weight_versions_are_checked(spans: list[tuple[str, int, int]], message: str) -> None:
    server = StandIn(0, 0.2)
    server.version = "8"
    server.spans = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    with dispatcher_of([server]) as dispatcher:
        submit(dispatcher, requests_of(1))
        assert is_running(server, 1)
        dispatcher.begin_update(8)
        assert re.search(message, failure_of(dispatcher))


def test_unrequested_abort_is_a_failure() -> None:
    server = StandIn(0, 30.0)
    with dispatcher_of([server]) as dispatcher:
        submit(dispatcher, requests_of(1))
        assert is_running(server, 1)
        call(server.endpoint, "/abort_request", {"abort_all": True}, timeout_seconds=5)
        assert "broke a response off" in failure_of(dispatcher)


def test_requests_of_an_aborted_engine_are_not_sent_again() -> None:
    """The engine answers all requests of the pause, and accepts requests afterwards."""
    server = StandIn(0, 30.0)
    with closing(StandInEngine([server])) as engine:
        futures = engine.submit([*requests_of(2).values()], PARAMS)
        assert is_running(server, 2)
        engine.pause("abort")
        assert all(future.done() and future.result().broken_off for future in futures)
        server.seconds = 0.0
        (again,) = engine.submit([replace(requests_of(1)[0], seed=5)], PARAMS)
        engine.poll(20.0)
        assert again.result().token_ids == (100, 1) and server.requested_samples == 3
