"""Distribute requests over servers and collect the answers, or report the failed server.

Requests are sent in small groups to the servers that `RequestAssignment` selects. Requests that wait for a busy
server move to a free server. Unanswered requests of a dead or hung server move to the other servers. The caller
handles the requests that no server could answer. Groups shrink towards the end, so that servers finish together.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import aiohttp

from megappo.config.engine import SGLangSettings
from megappo.engines.protocol import CacheUse, Completion, GenerateRequest, SamplingParams
from megappo.engines.sglang.answers import Answer, cache_use, completion_of, routing_of
from megappo.engines.sglang.assignment import RequestAssignment
from megappo.engines.sglang.client import HEALTH, Endpoint, ServerFailure
from megappo.engines.sglang.homes import Homes
from megappo.engines.sglang.sampling import sampling_fields
from megappo.engines.sglang.server import EngineError
from megappo.engines.stopping import stopped
from megappo.observe.progress import PROGRESS, SAMPLES
from megappo.runtime.deadlines import Deadlines
from megappo.runtime.interrupts import Stop

_LARGEST_GROUP = 32
"""Maximum number of requests per call. With routing, each answer has a separate call, because the routing of 48
layers with 8 experts has 2 KB per token."""
_WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class RoundLimits:
    """Limits of the requests to each server. Times are in seconds."""

    max_inflight_sequences: int
    request_seconds: float
    """Time without an answer after which the client checks that the server still processes the request."""
    stall_seconds: float
    """Time without any answer after which the health of a server is checked."""
    health_seconds: float
    """Timeout of a health check."""

    @classmethod
    def of(cls, settings: SGLangSettings, deadlines: Deadlines) -> RoundLimits:
        """Return the limits of a run."""
        sequences, stall = settings.max_inflight_sequences, settings.stall_timeout_seconds
        return cls(sequences, deadlines.request_seconds, stall, settings.health_timeout_seconds)


@dataclass
class Outcome:
    """Answers and failures of a round of requests on this rank."""

    completions: dict[int, Completion] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    """Reasons of failed servers, by server."""
    refusal: str | None = None
    """Error of a request that every server would reject, or None. The error ends the run."""
    cache: dict[int, CacheUse] = field(default_factory=dict)
    """Use of the prefix caches, by server."""
    answered: int = 0
    """Number of answered requests, including requests whose answers were already taken."""


@dataclass
class Lane:
    """One server and its unanswered requests."""

    endpoint: Endpoint
    sequences: int = 0
    last_answer: float = field(default_factory=time.monotonic)
    calls: dict[asyncio.Task[list[Completion]], list[int]] = field(default_factory=dict)
    check: asyncio.Task[bool] | None = None
    """Running health check, started after a long time without an answer."""

    @property
    def tasks(self) -> list[asyncio.Task[list[Completion]] | asyncio.Task[bool]]:
        """The running asyncio tasks: requests and the health check."""
        return [*self.calls, *([self.check] if self.check else [])]


class Round:
    """Requests in flight, managed by a separate thread so that the trainer can compute in parallel."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        requests: dict[int, GenerateRequest],
        params: SamplingParams,
        version: int,
        limits: RoundLimits,
        on_tokens: Callable[[], None] = lambda: None,
        homes: Homes | None = None,
    ) -> None:
        """Start the requests.

        Args:
            on_tokens: Callback in the thread of the round. Called after any sign that a server generates tokens.
            homes: Servers with cached prefixes of prompts, kept over all rounds with these weights. None if no other
                round
                has these prompts.
        """
        self._on_tokens = on_tokens
        self._lanes = [Lane(endpoint) for endpoint in endpoints]
        self._requests, self._params, self._version, self._limits = requests, params, version, limits
        self._homes = homes
        # Send the longest prompts first, so that no long prompt remains at the end.
        order = sorted(requests, key=lambda i: -len(requests[i].token_ids))
        prompt_ids = {i: requests[i].prompt_id for i in order}
        prompt_tokens = {i: len(requests[i].token_ids) for i in order}
        self._assignment = RequestAssignment(
            [e.index for e in endpoints],
            prompt_ids,
            prompt_tokens,
            params.max_new_tokens,
            {} if homes is None else homes.of(requests),
        )
        self._outcome = Outcome()
        self._largest_group = _LARGEST_GROUP if params.routing is None else 1
        self._aborts = False
        """Whether servers are aborting their requests."""
        self._oldest = version
        """Oldest weight version of the tokens. The value is below `_version` if servers keep requests during a sync."""
        self._is_held = False
        """Whether servers are paused for a weight update."""
        if requests:
            PROGRESS.expect(SAMPLES, len(requests))
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._spread())
        pool = ThreadPoolExecutor(1, thread_name_prefix="megappo-rollout")
        self._finished = pool.submit(self._loop.run_until_complete, self._task)
        pool.shutdown(wait=False)

    def result(self, stop: Stop | None = None) -> Outcome:
        """Wait for the answers of all working servers and return the outcome. Each server has deadlines. If the run
        must stop, the method returns the answers that have arrived."""
        try:
            while stop is not None and not stop.requested and not self._finished.done():
                wait([self._finished], timeout=_WATCH_SECONDS)
            if stop is None or not stop.requested:
                self._finished.result()
        finally:
            self.cancel()
        return self._outcome

    def cancel(self) -> None:
        """Cancel the remaining requests."""
        if not self._finished.done():
            self._loop.call_soon_threadsafe(self._task.cancel)
            wait([self._finished])
        if not self._loop.is_closed():
            self._loop.close()

    @property
    def _is_done(self) -> bool:
        """Whether all requests are answered."""
        return not (self._assignment.waiting or any(lane.calls for lane in self._lanes))

    def _news(self) -> list[asyncio.Future[None]]:
        """Return futures that complete when more requests arrive. With an empty list, the round ends after the last
        call."""
        return []

    async def _spread(self) -> None:
        if self._is_done:
            return
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            try:
                while not self._is_done and not self._outcome.refusal:
                    self._hand_out(session)
                    calls = {call: lane for lane in self._lanes for call in lane.calls}
                    news = self._news()
                    if not calls and not news:
                        return  # no server is left
                    PROGRESS.note_servers(sum(bool(lane.calls) for lane in self._lanes), len(self._lanes))
                    tasks = [*news, *(task for lane in self._lanes for task in lane.tasks)]
                    done, _ = await asyncio.wait(tasks, timeout=_WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    for call, lane in calls.items():
                        if call in done and call in lane.calls:  # otherwise its server failed a moment ago
                            self._take(lane, call)
                    for lane in list(self._lanes):
                        self._watch(session, lane)
            finally:
                PROGRESS.note_servers(0, 0)
                for lane in self._lanes:
                    for task in lane.tasks:
                        task.cancel()

    def _hand_out(self, session: aiohttp.ClientSession) -> None:
        """Send assigned requests to every server with room. Then move waiting requests of other servers to servers
        that still have room."""
        for lane in self._lanes:
            self._fill(session, lane)
        free = [lane for lane in self._lanes if self._room(lane)]
        owed = self._assignment.owed
        while free and self._assignment.relieve(
            (lane := min(free, key=lambda lane: owed.of(lane.endpoint.index))).endpoint.index
        ):
            self._fill(session, lane)
            free = [lane for lane in free if self._room(lane)]

    def _room(self, lane: Lane) -> int:
        return self._limits.max_inflight_sequences - lane.sequences

    def _fill(self, session: aiohttp.ClientSession, lane: Lane) -> None:
        while group := self._assignment.take(lane.endpoint.index, min(self._room(lane), self._largest_group)):
            if not lane.calls:
                lane.last_answer = time.monotonic()
            lane.calls[asyncio.ensure_future(self._ask(session, lane.endpoint, group))] = group
            lane.sequences += len(group)

    def _take(self, lane: Lane, call: asyncio.Task[list[Completion]]) -> None:
        group = lane.calls.pop(call)
        lane.sequences -= len(group)
        try:
            completions = call.result()
        except EngineError as refusal:
            self._outcome.refusal = str(refusal)
            return
        except ServerFailure as failure:
            self._lose(lane, str(failure), group)
            return
        lane.last_answer = time.monotonic()
        self._on_tokens()
        self._assignment.answered(
            lane.endpoint.index, {i: len(answer.token_ids) for i, answer in zip(group, completions, strict=True)}
        )
        if self._homes is not None:
            for number in group:
                self._homes.note(self._requests[number], lane.endpoint.index)
        self._outcome.completions |= zip(group, completions, strict=True)
        self._outcome.answered += len(group)
        PROGRESS.add(SAMPLES, len(group), tokens=sum(len(answer.token_ids) for answer in completions))

    def _lose(self, lane: Lane, reason: str, owed: Sequence[int] = ()) -> None:
        """Remove a failed server. Its requests, in its calls and in `owed`, move to the other servers."""
        self._outcome.failures[lane.endpoint.index] = reason
        for task in lane.tasks:
            task.cancel()
        self._assignment.lose(lane.endpoint.index, [*owed, *(i for group in lane.calls.values() for i in group)])
        lane.calls.clear()
        self._lanes.remove(lane)

    def _watch(self, session: aiohttp.ClientSession, lane: Lane) -> None:
        """Start a health check of a server that has not answered for a long time. Other servers continue to work."""
        silent = time.monotonic() - lane.last_answer
        if self._is_held:
            lane.last_answer = time.monotonic()
        overdue = bool(lane.calls) and silent >= self._limits.stall_seconds and not self._is_held
        if lane.check is None:
            if overdue:
                lane.check = asyncio.ensure_future(self._is_well(session, lane.endpoint))
        elif lane.check.done():
            well, lane.check = lane.check.result(), None
            if well:
                lane.last_answer = time.monotonic()
                self._on_tokens()
            elif overdue:
                self._lose(
                    lane,
                    f"{lane.endpoint.name} returned no answer for {silent:.0f} seconds and failed its health check",
                )

    async def _get(self, session: aiohttp.ClientSession, endpoint: Endpoint, path: str) -> bytes | None:
        """Return the body of the response to a GET request, or None without a response of status 200 before the
        deadline."""
        try:
            async with asyncio.timeout(self._limits.health_seconds):
                async with session.get(f"{endpoint.url}{path}", headers=endpoint.headers) as answer:
                    return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def _is_well(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> bool:
        """Return whether a server generates a token before the deadline. A paused server counts as healthy."""
        return await self._get(session, endpoint, HEALTH) is not None or self._is_held

    async def _works(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> bool:
        """Return whether a server has requests and generates tokens. A paused server counts as working."""
        if self._is_held:
            return True
        if not await self._is_well(session, endpoint):
            return False
        answer = await self._get(session, endpoint, "/v1/loads?include=core")
        try:
            loads = json.loads(answer)["loads"] if answer is not None else []
            return any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
        except (LookupError, TypeError, ValueError):
            return False  # an answer of unknown form counts as "no requests"

    async def _has_lost(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, answer: asyncio.Task[list[Completion]]
    ) -> bool:
        """Return whether a server has no request in two checks. The counts of a single check may be outdated by some
        tokens."""
        for pause_seconds in (self._limits.stall_seconds, 0.0):
            if await self._works(session, endpoint) or (await asyncio.wait([answer], timeout=pause_seconds))[0]:
                return False
        return True

    async def _ask(self, session: aiohttp.ClientSession, endpoint: Endpoint, group: list[int]) -> list[Completion]:
        """Send a group of requests and wait as long as the server processes the group. Raises as `_post`."""
        limit = self._limits.request_seconds
        answer = asyncio.ensure_future(self._post(session, endpoint, group))
        try:
            while not (await asyncio.wait([answer], timeout=limit))[0]:
                if await self._has_lost(session, endpoint, answer):
                    raise ServerFailure(
                        f"{endpoint.name} returned no response within {limit:g} seconds and has no request in progress"
                    )
                self._on_tokens()
            return answer.result()
        finally:
            answer.cancel()

    async def _post(self, session: aiohttp.ClientSession, endpoint: Endpoint, group: list[int]) -> list[Completion]:
        """Send one HTTP request for a group. Raises ServerFailure if the server failed, and EngineError if it
        rejected the request."""
        body = {
            "input_ids": [list(self._requests[i].token_ids) for i in group],
            "sampling_params": [sampling_fields(self._requests[i], self._params) for i in group],
            "return_logprob": True,
            # Only requests of one version share prefixes, even if a sync keeps the caches (`pause`).
            "extra_key": [str(self._version)] * len(group),
            "return_routed_experts": self._params.routing is not None,
        }
        try:
            async with session.post(f"{endpoint.url}/generate", json=body, headers=endpoint.headers) as answer:
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
                return self._read(texts, endpoint, group)
            except (LookupError, TypeError, ValueError, AttributeError) as error:  # SGLang's answers have another form
                raise ServerFailure(
                    f"{endpoint.name} returned a response that is not a list of answers ({error!r}): {content[:100]!r}"
                ) from None

    def _read(self, texts: Sequence[Answer], endpoint: Endpoint, group: list[int]) -> list[Completion]:
        """Check and convert the answers for a group. Raises as `_post`."""
        versions = range(self._oldest, self._version + 1)
        answers = [completion_of(text, endpoint, versions, may_be_aborted=self._aborts) for text in texts]
        if len(answers) != len(group):
            raise ServerFailure(f"{endpoint.name} returned {len(answers)} answers to {len(group)} requests")
        self._outcome.cache[endpoint.index] = self._outcome.cache.get(endpoint.index, CacheUse()) + cache_use(texts)
        if self._params.routing is not None:
            answers = [
                replace(answer, routing=routing_of(text, self._requests[i], self._params.routing, endpoint))
                for i, answer, text in zip(group, answers, texts, strict=True)
            ]
        for i, answer in zip(group, answers, strict=True):
            most = self._requests[i].most_tokens(self._params)
            if answer.truncated and len(answer.token_ids) < most:
                raise EngineError(
                    f"{endpoint.name} ended a response after {len(answer.token_ids)} of {most} tokens because its "
                    "context or its pool is full; start the server with a context length and a pool that are at "
                    "least 8 tokens larger"
                )
        return [stopped(answer, self._params) for answer in answers]


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
