"""Requests survive failed, hanging and incorrect servers. Failures that no restart can repair end the run.

The servers of these tests are stand-ins.
"""

from __future__ import annotations

import importlib.util
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megappo.config.schema import RuntimeSettings
from megappo.engines.protocol import GenerateRequest
from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.errors import Interrupted
from megappo.runtime.waiting import wait_until
from megappo.runtime.watch.deadlines import Deadlines
from megappo.types import RoutingShape

if importlib.util.find_spec("aiohttp") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

from megappo.engines.sglang.engine import SGLangEngine
from megappo.engines.sglang.servers.server import EngineError
from tests.support.stand_in import (
    PARAMS,
    VERSION,
    StandIn,
    StandInEngine,
    complete,
    dispatch,
    dispatcher_of,
    requests_of,
    settings,
    spread,
    submit,
)

pytestmark = [pytest.mark.slow, pytest.mark.waits]


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
    well, hanging = StandIn(0, 0.04), StandIn(1)
    hanging.hang_after, hanging.health_seconds = 0, 60.0
    outcome = spread([well, hanging], max_inflight_sequences=4, health_timeout_seconds=3.0)
    assert complete(outcome) and list(outcome.failures) == [1]
    pauses = [later - earlier for earlier, later in zip(well.answered_at, well.answered_at[1:], strict=False)]
    assert max(pauses[:160]) < 1.5  # 196 samples, four at a time, during the health check of the other engine


def test_slow_healthy_engine_does_not_fail() -> None:
    slow = StandIn(0, 1.0)
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
    slow = StandIn(0, 2.0)
    progress_times: list[float] = []
    on_tokens = lambda: progress_times.append(time.monotonic())  # noqa: E731
    patient = {"request_timeout_seconds": 0.5, "stall_timeout_seconds": 60.0}
    outcome = dispatch([slow], requests_of(5), PARAMS, on_tokens, **patient)
    assert complete(outcome, 5) and not outcome.failures
    assert sum(t < slow.answered_at[0] for t in progress_times) >= 3  # progress was reported during the rollout


def test_requests_remain_without_engines() -> None:
    outcome = spread([], 5)
    assert outcome.completions == {} and outcome.unanswered == 5


def test_answers_of_other_weights_are_rejected() -> None:
    well, old = StandIn(0), StandIn(1)
    old.version = "6"
    outcome = spread([well, old])
    assert complete(outcome)
    assert "generated with weights ['6'], not 7" in outcome.failures[1]


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
        ("[[1], [2]]", "returned 2 answers to 1 request"),
        ("[[1]]", "returned a response that is not a list of answers"),
        ("[]", "returned 0 answers to 1 request"),
    ],
)
def test_unknown_response_format_fails_the_server(response: str, message: str) -> None:
    """Servers of other versions can use a different format. Other servers then answer the requests."""
    strange, well = StandIn(0), StandIn(1)
    strange.page = response
    outcome = spread([strange, well])
    assert complete(outcome)
    assert message in outcome.failures[0]


@pytest.mark.parametrize("encoded", [None, "", "AAAA", "AAAAAAAA"])
def test_server_without_routing_fails(encoded: str | None) -> None:
    server = StandIn(0)
    server.routing = None if encoded is None else lambda _: str(encoded)
    outcome = spread([server], 2, replace(PARAMS, routing=RoutingShape(1, 1, 4)))
    assert not outcome.completions
    assert "did not return the experts of all 3 x 1 x 1 positions" in outcome.failures[0]


def test_rejected_request_stops_the_run() -> None:
    server = StandIn(0)
    server.status = 400
    outcome = spread([server], 40)
    assert outcome.refusal is not None and "rejected a generation request: because" in outcome.refusal
    assert outcome.unanswered == 40 and not outcome.failures


def test_response_below_its_length_limit_is_rejected() -> None:
    """SGLang ends a response early if the context or the pool is full, and reports the length limit as the reason."""
    server = StandIn(0)
    server.finish = "length"
    assert "ended a response after 2 of 4 tokens because its context or its pool is full" in str(
        spread([server], 3).refusal
    )
    assert complete(spread([server], 3, replace(PARAMS, max_new_tokens=2)), 3)


def test_error_of_the_thread_reaches_the_trainer() -> None:
    def fail() -> None:
        raise KeyError("price")

    with dispatcher_of([StandIn(0)], fail) as dispatcher:
        submit(dispatcher, requests_of(2))
        assert dispatcher.wait(20.0)
        for _ in range(2):
            with pytest.raises(KeyError, match="price"):
                dispatcher.report()


def test_dispatcher_can_be_closed() -> None:
    server = StandIn(0)
    server.hang_after = 0
    with dispatcher_of([server], stall_timeout_seconds=60.0) as dispatcher:
        submit(dispatcher, requests_of(1))
        started = time.monotonic()
    assert time.monotonic() - started < 5


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


# The engine restarts failed servers.


def test_repeated_failures_of_all_servers_end_the_run(world_of_one: None) -> None:
    """Failures do not count if another request is answered in between."""
    failing, well = StandIn(0), StandIn(1)
    failing.status = 500
    long = GenerateRequest((5,) * 9, seed=0, prompt_id=41, replica=0)
    with closing(StandInEngine([failing, well], repairs=False)) as engine:
        engine.submit([long], PARAMS)
        for restarts in (1, 2):
            engine.poll(20.0)
            assert engine.restarted == [0] * restarts
        assert engine.submit([replace(long, replica=1)], PARAMS)[0].result(20.0).token_ids == (5, 1)
        for restarts in (3, 4):
            engine.poll(20.0)
            assert engine.restarted == [0] * restarts
        sentence = (
            "failed 3 times in a row before any request was answered; the likely cause is a remaining request, "
            "such as prompt 41, of 9 tokens, or"
        )
        with pytest.raises(EngineError, match=f"{sentence} the machines.*failed to generate: because"):
            engine.poll(20.0)


def test_failed_server_restarts_during_the_rollout(world_of_one: None) -> None:
    """The running requests of the other server are not interrupted. Afterwards both servers answer requests."""
    slow, failing = StandIn(0, 1.0), StandIn(1)
    failing.fail_after = 0
    with closing(StandInEngine([slow, failing])) as engine:
        futures = dict(enumerate(engine.submit([*requests_of(4).values()], PARAMS)))
        engine.poll(20.0)
        assert engine.restarted == [1] and engine.current == {0, 1} and engine.version == VERSION
        assert slow.aborts == 0 and slow.running and not any(future.done() for future in futures.values())
        while not all(future.done() for future in futures.values()):
            engine.poll(20.0)
        answers = [future.result() for future in futures.values()]
        assert [answer.token_ids for answer in answers] == [(100 + i, 1) for i in range(4)]
        assert slow.requested_samples == 4, "the requests of the failed server move at once"
        engine.submit([*requests_of(range(4, 6)).values()], PARAMS)
        engine.poll(20.0)
        assert failing.bodies[-1]["input_ids"] == [[2, 105]]


def test_server_with_newer_weights_restarts_after_running_requests(world_of_one: None) -> None:
    """The remaining requests are answered under the next version by all servers."""
    slow, failing = StandIn(0, 1.0), StandIn(1)
    failing.fail_after = 0
    with closing(StandInEngine([slow, failing])) as engine:
        running = engine.submit([*requests_of(2).values()], PARAMS)
        pinned = engine.submit([replace(requests_of(3)[2], replica=1)], PARAMS)
        assert wait_until(lambda: slow.running == 2, 20.0, every_seconds=0.01)
        engine.poll(0.5, weights_changed=True)
        assert engine.restarted == [] and engine.current == {0} and engine.version == VERSION
        while not all(future.done() for future in (*running, *pinned)):
            engine.poll(0.2, weights_changed=engine.version == VERSION)
        assert engine.restarted == [1] and engine.version == VERSION + 1 and engine.current == {0, 1}
        assert [future.result().weight_version for future in (*running, *pinned)] == [7, 7, 8]


class StopRequest:
    """Stop request that becomes active once an answer is read. On busy cores the engine reads later than the server
    answers."""

    requested = False

    def request(self) -> None:
        self.requested = True

    def check(self) -> None:
        if self.requested:
            raise Interrupted(signal.SIGTERM)


def test_stop_request_keeps_completed_answers(world_of_one: None) -> None:
    server, stop = StandIn(0), StopRequest()
    server.hang_after = 40
    with closing(StandInEngine([server], stop=stop, stall_timeout_seconds=60.0)) as engine:
        engine.on_tokens = stop.request
        futures = engine.submit([*requests_of(200).values()], PARAMS)
        started = time.monotonic()
        with pytest.raises(Interrupted):
            engine.poll(600.0)
        assert time.monotonic() - started < 20
        done = {i: future.result() for i, future in enumerate(futures) if future.done()}
        assert 0 < len(done) < 200 and engine.current == {0}
        assert all(completion.token_ids == (100 + i, 1) for i, completion in done.items())


@pytest.mark.parametrize("status", [400, 500])
def test_rejected_probe_reports_the_reason(world_of_one: None, status: int) -> None:
    """A server that fails during its probe is restarted and answers the probe."""
    well, failing = StandIn(0), StandIn(1)
    failing.status = status
    with closing(StandInEngine([well, failing])) as engine:
        assert engine.replicas == [0, 1]
        request = GenerateRequest((2, 100), seed=0, prompt_id=0)
        first, second = engine.submit([replace(request, replica=replica) for replica in engine.replicas], PARAMS)
        if status == 400:
            with pytest.raises(EngineError, match="server 1 .* rejected a generation request: because"):
                engine.poll(20.0)
            return
        engine.poll(20.0)
        assert first.result(20.0).token_ids == (100, 1) and engine.restarted == [1]
        assert second.result(20.0).token_ids == (100, 1)
        assert well.requested_samples == 1 and failing.requested_samples == 2


def test_engine_without_weights_reports_the_reason(world_of_one: None) -> None:
    """An abort without requests in progress has no effect."""
    each_own: Callable[..., dict[int, str]] = lambda endpoints, act: {}  # noqa: E731
    spec = SimpleNamespace(returns_routing=False, memory_saver=True)
    fleet: Any = SimpleNamespace(spec=spec, each_own=each_own, close=lambda: None)
    runtime: Any = SimpleNamespace(deadlines=Deadlines.of(RuntimeSettings()), rank=0, is_main=True)
    with closing(SGLangEngine(fleet, settings(), runtime)) as engine:
        request = GenerateRequest((2, 100), seed=0, prompt_id=0)
        with pytest.raises(RuntimeError, match="the engine has no complete set of weights; call update_weights first"):
            engine.submit([request], PARAMS)
        engine.pause("abort")
        engine.poll(0.0)
        engine.sleep()
        with pytest.raises(RuntimeError, match="the engine is asleep; call update_weights first"):
            engine.submit([request], PARAMS)
