"""Send generation requests to servers, and observe whether the servers still process them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import aiohttp

from megappo.config.sections.engine import ServerSettings
from megappo.engines.protocol import CacheUse, Completion, GenerateRequest, SamplingParams
from megappo.engines.sglang.client import HEALTH, Endpoint, ServerFailure
from megappo.engines.sglang.requests.answers import Answer, cache_use, completion_of, routing_of
from megappo.engines.sglang.requests.sampling import sampling_fields
from megappo.engines.sglang.servers.server import EngineError
from megappo.engines.stretches import stopped
from megappo.runtime.watch.deadlines import Deadlines


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the requests to each server. Times are in seconds."""

    max_inflight_sequences: int
    request_seconds: float
    """Time without an answer after which the client checks that the server still processes the request."""
    stall_seconds: float
    """Time without any answer after which the health of a server is checked."""
    health_seconds: float
    """Timeout of a health check."""

    @classmethod
    def of(cls, settings: ServerSettings, deadlines: Deadlines) -> RequestLimits:
        """Return the limits of a run."""
        sequences, stall = settings.max_inflight_sequences, settings.stall_timeout_seconds
        return cls(sequences, deadlines.request_seconds, stall, settings.health_timeout_seconds)


class GenerationClient:
    """HTTP client for generation requests, in one event loop."""

    def __init__(self, limits: RequestLimits, on_tokens: Callable[[], None]) -> None:
        self._limits, self._on_tokens = limits, on_tokens
        self._session: aiohttp.ClientSession | None = None
        self.version = 0
        """Current weight version of the servers."""
        self.aborts = False
        """Whether servers are aborting their requests."""
        self.is_paused = False
        """Whether servers are paused for a weight update."""
        self.cache: dict[int, CacheUse] = {}
        """Use of the prefix caches since the start, by server."""

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def _get(self, endpoint: Endpoint, path: str) -> bytes | None:
        """Return the body of the response to a GET request, or None without a response of status 200 before the
        deadline."""
        try:
            async with asyncio.timeout(self._limits.health_seconds):
                async with self._http.get(f"{endpoint.url}{path}", headers=endpoint.headers) as answer:
                    return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def is_well(self, endpoint: Endpoint) -> bool:
        """Return whether a server generates a token before the deadline. A paused server counts as healthy."""
        return await self._get(endpoint, HEALTH) is not None or self.is_paused

    async def _works(self, endpoint: Endpoint) -> bool:
        """Return whether a server has requests and generates tokens. A paused server counts as working."""
        if self.is_paused:
            return True
        if not await self.is_well(endpoint):
            return False
        answer = await self._get(endpoint, "/v1/loads?include=core")
        try:
            loads = json.loads(answer)["loads"] if answer is not None else []
            return any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
        except (LookupError, TypeError, ValueError):
            return False  # an answer of unknown form counts as "no requests"

    async def _has_lost(self, endpoint: Endpoint, answer: asyncio.Task[Completion]) -> bool:
        """Return whether a server has no request in two checks. The counts of a single check may be outdated by some
        tokens."""
        for pause_seconds in (self._limits.stall_seconds, 0.0):
            if await self._works(endpoint) or (await asyncio.wait([answer], timeout=pause_seconds))[0]:
                return False
        return True

    async def generate(self, endpoint: Endpoint, request: GenerateRequest, params: SamplingParams) -> Completion:
        """Send a request and wait as long as the server processes the request.

        Raises ServerFailure if the server failed, and EngineError if the server rejected the request.
        """
        limit = self._limits.request_seconds
        answer = asyncio.ensure_future(self._post(endpoint, request, params))
        try:
            while not (await asyncio.wait([answer], timeout=limit))[0]:
                if await self._has_lost(endpoint, answer):
                    raise ServerFailure(
                        f"{endpoint.name} returned no response within {limit:g} seconds and has no request in progress"
                    )
                self._on_tokens()
            return answer.result()
        finally:
            answer.cancel()

    async def _post(self, endpoint: Endpoint, request: GenerateRequest, params: SamplingParams) -> Completion:
        body = {
            "input_ids": [list(request.token_ids)],
            "sampling_params": [sampling_fields(request, params)],
            "return_logprob": True,
            # Only requests of one version share prefixes, even if a sync keeps the caches (`pause`).
            "extra_key": [str(self.version)],
            "return_routed_experts": params.routing is not None,
        }
        version = self.version
        try:
            async with self._http.post(f"{endpoint.url}/generate", json=body, headers=endpoint.headers) as answer:
                if 400 <= answer.status < 500:
                    raise EngineError(f"{endpoint.name} rejected a generation request: {(await answer.text())[:500]}")
                if answer.status != 200:
                    raise ServerFailure(f"{endpoint.name} failed to generate: {(await answer.text())[:500]}")
                content = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(f"{endpoint.name} closed the connection during generation ({error!r})") from None
        with _no_collections():
            try:
                texts = json.loads(content)
            except ValueError:
                raise ServerFailure(f"{endpoint.name} returned invalid JSON: {content[:100]!r}") from None
            try:
                return self._read(texts, endpoint, request, params, version)
            except (LookupError, TypeError, ValueError, AttributeError) as error:  # SGLang's answers have another form
                raise ServerFailure(
                    f"{endpoint.name} returned a response that is not a list of answers ({error!r}): {content[:100]!r}"
                ) from None

    def _read(
        self,
        texts: Sequence[Answer],
        endpoint: Endpoint,
        request: GenerateRequest,
        params: SamplingParams,
        version: int,
    ) -> Completion:
        """Check and convert the answer to a request that was sent with a weight version. Raises as `generate`."""
        if len(texts) != 1:
            raise ServerFailure(f"{endpoint.name} returned {len(texts)} answers to 1 request")
        versions = range(version, self.version + 1)
        answer = completion_of(texts[0], endpoint, versions, may_be_aborted=self.aborts)
        if request.replica is None:  # a probe does not belong to a rollout
            self.cache[endpoint.index] = self.cache.get(endpoint.index, CacheUse()) + cache_use(texts)
        if params.routing is not None:
            answer = replace(answer, routing=routing_of(texts[0], request, params.routing, endpoint))
        most = request.most_tokens(params)
        if answer.truncated and len(answer.token_ids) < most:
            raise EngineError(
                f"{endpoint.name} ended a response after {len(answer.token_ids)} of {most} tokens because its "
                "context or its pool is full; start the server with a context length and a pool that are at "
                "least 8 tokens larger"
            )
        return stopped(answer, params)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disable Python's garbage collector. An answer contains a list per token. Some ten thousand lists trigger
    collections that traverse every object of the trainer, which takes longer than parsing. Reference counting frees
    the lists."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
