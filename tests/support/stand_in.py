"""A stand-in for an SGLang server, and helpers that send requests to stand-ins."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from megappo.config.schema import RuntimeSettings
from megappo.config.sections.engine import LEAST_REQUEST_SECONDS, ServerSettings
from megappo.engines.protocol import CacheUse, Completion, GenerateRequest, SamplingParams
from megappo.engines.sglang.client import Endpoint
from megappo.engines.sglang.engine import SGLangEngine
from megappo.engines.sglang.requests.dispatch import Dispatcher
from megappo.engines.sglang.requests.generation import RequestLimits
from megappo.runtime.watch.deadlines import Deadlines
from megappo.runtime.watch.interrupts import Stop

PARAMS = SamplingParams(temperature=0.5, max_new_tokens=4, stop_token_ids=(1,))
VERSION = 7
"""Weight version of the stand-ins."""


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
        self.running = self.most_running = 0
        """Number of samples in generation."""
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
        self.most_running = max(self.most_running, self.running)
        self.ends_on_abort.add(end := asyncio.Event())
        with suppress(TimeoutError):
            await asyncio.wait_for(end.wait(), self.seconds * len(body["input_ids"]))
        while not self.may_answer():
            await asyncio.sleep(0.005)
        self.ends_on_abort.remove(end)
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


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**({"stall_timeout_seconds": 0.5, "health_timeout_seconds": 1.0} | changes))


def limits(**changes: Any) -> RequestLimits:
    """Return the limits of `settings`, with the request timeout of the settings."""
    engine_settings = settings(**changes)
    request_seconds = engine_settings.request_timeout_seconds or LEAST_REQUEST_SECONDS
    return RequestLimits.of(engine_settings, replace(Deadlines.of(RuntimeSettings()), request_seconds=request_seconds))


@contextmanager
def dispatcher_of(
    servers: Sequence[StandIn], on_tokens: Callable[[], None] = lambda: None, **changes: Any
) -> Iterator[Dispatcher]:
    """Yield a dispatcher that uses these servers."""
    made = Dispatcher(limits(**changes), on_tokens)
    try:
        made.use([server.endpoint for server in servers], VERSION)
        yield made
    finally:
        made.close()


@dataclass
class Outcome:
    """Answers and events of a batch of requests."""

    completions: dict[int, Completion] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    refusal: str | None = None
    answered: int = 0
    unanswered: int = 0
    cache: Mapping[int, CacheUse] = field(default_factory=dict)


def outcome_of(
    dispatcher: Dispatcher,
    futures: Mapping[int, Future[Completion]],
    servers: Sequence[StandIn] | Sequence[Endpoint],
) -> Outcome:
    """Wait until the requests are answered, a request is rejected, or all servers have failed."""
    outcome, indices = Outcome(), {server.index for server in servers}
    deadline = time.monotonic() + 300
    while True:
        dispatcher.wait(0.2)
        report = dispatcher.report()
        outcome.failures |= report.failures
        outcome.refusal = outcome.refusal or report.refusal
        outcome.answered += report.answered
        outcome.unanswered = report.unanswered
        if not report.unanswered or outcome.refusal or indices <= outcome.failures.keys():
            break
        assert time.monotonic() < deadline, f"{report.unanswered} requests are unanswered"
    outcome.completions = {number: future.result() for number, future in futures.items() if future.done()}
    outcome.cache = dispatcher.cache
    return outcome


def dispatch(
    servers: Sequence[StandIn],
    requests: Mapping[int, GenerateRequest],
    params: SamplingParams = PARAMS,
    on_tokens: Callable[[], None] = lambda: None,
    **changes: Any,
) -> Outcome:
    """Send requests to servers, and return the answers and events."""
    with dispatcher_of(servers, on_tokens, **changes) as dispatcher:
        return outcome_of(dispatcher, submit(dispatcher, requests, params), servers)


def submit(
    dispatcher: Dispatcher, requests: Mapping[int, GenerateRequest], params: SamplingParams = PARAMS
) -> dict[int, Future[Completion]]:
    return dict(zip(requests, dispatcher.submit(list(requests.values()), params), strict=True))


def requests_of(numbers: int | range) -> dict[int, GenerateRequest]:
    """Return one request per prompt. `StandIn` answers request i with the tokens 100 + i and 1."""
    numbers = range(numbers) if isinstance(numbers, int) else numbers
    return {i: GenerateRequest((2, 100 + i), seed=i, prompt_id=i) for i in numbers}


def spread(servers: Sequence[StandIn], count: int = 200, params: SamplingParams = PARAMS, **changes: Any) -> Outcome:
    return dispatch(servers, requests_of(count), params, **changes)


def complete(outcome: Outcome, count: int = 200) -> bool:
    """Return whether each request has exactly one answer."""
    return (
        all(outcome.completions[i].token_ids == (100 + i, 1) for i in range(count))
        and len(outcome.completions) == outcome.answered == count
    )


class StandInEngine(SGLangEngine):
    """An engine whose servers are stand-ins. A restart repairs failed servers if `repairs` is set."""

    def __init__(
        self, servers: Sequence[StandIn], *, repairs: bool = True, stop: Stop | None = None, **changes: Any
    ) -> None:
        fleet: Any = SimpleNamespace(spec=SimpleNamespace(returns_routing=False, memory_saver=False))
        runtime: Any = SimpleNamespace(rank=0, is_main=False, deadlines=Deadlines.of(RuntimeSettings()))
        super().__init__(fleet, settings(**changes), runtime, stop)
        self.servers, self.repairs = servers, repairs
        self.restarted: list[int] = []
        """Number of each restarted server."""
        weights: Any = None
        self.update_weights(weights, VERSION)

    def _revive(self) -> None:
        for server in self.servers:
            if server.index in self._suspects:
                self.restarted.append(server.index)
                server.endpoint = replace(server.endpoint, starts=server.endpoint.starts + 1)
                if self.repairs:
                    server.status, server.fail_after, server.hang_after, server.healthy = 200, None, None, True
        self._endpoints, self._suspects = [server.endpoint for server in self.servers], set()

    def _renew(self, stale: Sequence[Endpoint]) -> dict[int, str]:
        for endpoint in stale:
            self.servers[endpoint.index].version = str(self.version)
        return {}

    def close(self) -> None:
        self._dispatcher.close()
