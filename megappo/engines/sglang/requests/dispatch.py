"""Distribute requests over servers and collect the answers.

Each request is one HTTP call to the server that `RequestAssignment` selects. Requests that wait for a busy server move
to a free server. Unanswered requests of a dead or hung server move to the other servers, or wait until a server starts
again. The calls run in a separate thread, so that the trainer can compute in parallel.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megappo.engines.protocol import CacheUse, Completion, GenerateRequest, SamplingParams
from megappo.engines.sglang.client import Endpoint, ServerFailure
from megappo.engines.sglang.requests.assignment import RequestAssignment
from megappo.engines.sglang.requests.generation import GenerationClient, RequestLimits
from megappo.engines.sglang.servers.server import EngineError
from megappo.observe.terminal.progress import PROGRESS, SAMPLES

_WATCH_SECONDS = 1.0
T = TypeVar("T")


@dataclass
class DispatchReport:
    """Events of the requests of this rank since the last report, which ranks exchange."""

    failures: dict[int, str] = field(default_factory=dict)
    """Reasons of failed servers, by server."""
    refusal: str | None = None
    """Error of a request that every server would reject, or None. The error ends the run."""
    answered: int = 0
    """Number of answered requests."""
    unanswered: int = 0
    """Number of unanswered requests now."""
    running: int = 0
    """Number of requests that servers are processing now."""
    example: str = ""
    """Description of an unanswered request."""


@dataclass(eq=False)
class _Call:
    """A request and its future."""

    request: GenerateRequest
    params: SamplingParams
    future: Future[Completion] = field(default_factory=Future)


@dataclass(eq=False)
class Lane:
    """One server and its requests."""

    endpoint: Endpoint
    last_answer: float = field(default_factory=time.monotonic)
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Tasks of the requests in progress, by number."""
    check: asyncio.Task[bool] | None = None
    """Running health check, started after a long time without an answer."""


class Dispatcher:
    """The requests of this rank to all servers. Public methods may be called from any thread."""

    def __init__(self, limits: RequestLimits, on_tokens: Callable[[], None]) -> None:
        """Start the thread.

        `on_tokens` is called in the thread after any sign that a server generates tokens.
        """
        self._limits, self._on_tokens = limits, on_tokens
        self._client = GenerationClient(limits, on_tokens)
        self._lanes: dict[int, Lane] = {}
        self._calls: dict[int, _Call] = {}
        """Unanswered requests."""
        self._pinned: dict[int, deque[int]] = {}
        """Waiting requests for one specific server."""
        self._assignment = RequestAssignment(())
        self._numbers = itertools.count()
        self._report = DispatchReport()
        self._news = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="megappo-rollout", daemon=True)
        self._thread.start()

    # In any thread

    @property
    def cache(self) -> dict[int, CacheUse]:
        """Use of the prefix caches since the start, by server."""
        return dict(self._client.cache)

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        """Start requests, and return the future of each completion."""
        calls = {next(self._numbers): _Call(request, params) for request in requests}
        with self._news:
            self._calls |= calls
        self._loop.call_soon_threadsafe(self._start, self._add(calls))
        return [call.future for call in calls.values()]

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`. Returns whether all requests are answered or the caller must react to an
        event."""

        def has_news() -> bool:
            return bool(not self._calls or self._report.failures or self._report.refusal or self._error)

        with self._news:
            return self._news.wait_for(has_news, seconds)

    def report(self) -> DispatchReport:
        """Return the events since the last call. Raises the exception that ended the thread, if any."""
        if self._error is not None:
            raise self._error
        with self._news:
            report, self._report = self._report, DispatchReport()
            requests = [call.request for call in self._calls.values()]
        running = sum(len(lane.calls) for lane in list(self._lanes.values()))
        example = f"prompt {requests[0].prompt_id}, of {len(requests[0].token_ids)} tokens" if requests else ""
        return replace(report, unanswered=len(requests), running=running, example=example)

    def use(self, endpoints: Sequence[Endpoint], version: int) -> None:
        """Use these servers, which have the weights of this version. Waiting requests are sent."""
        self._call(self._use, list(endpoints), version)

    def begin_update(self, version: int) -> None:
        """Begin a weight update to this version. Paused servers generate as soon as they have the weights."""
        self._call(self._set_version, version)

    def hold(self) -> None:
        """Mark the servers as paused until the next `use`."""
        self._client.is_paused = True

    def abort(self) -> None:
        """Stop sending requests, and accept interrupted answers, until `end_abort`."""
        self._client.aborts = True

    @property
    def busy(self) -> list[Endpoint]:
        """Servers that are processing requests."""
        return [lane.endpoint for lane in list(self._lanes.values()) if lane.calls]

    def end_abort(self) -> None:
        """Answer all remaining requests without tokens."""
        self._call(self._drop_all)

    def lose(self, reasons: Mapping[int, str]) -> None:
        """Remove servers that failed on other ranks. Their requests move to other servers."""
        self._call(self._lose_all, reasons)

    def close(self) -> None:
        """Cancel all requests and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        async def run() -> None:
            function(*arguments)

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    # In the thread of the dispatcher

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._start(self._watch_all())
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._client.close())
        finally:
            PROGRESS.note_servers(0, 0)
            self._loop.close()

    async def _watch_all(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            for lane in list(self._lanes.values()):
                self._watch(lane)

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(coroutine)
        task.add_done_callback(self._note_error)
        return task

    def _note_error(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            with self._news:
                self._error = self._error or task.exception()
                self._news.notify_all()

    async def _add(self, new: dict[int, _Call]) -> None:
        calls = {number: call for number, call in new.items() if number in self._calls}  # others ended with an abort
        free = {number: call.request for number, call in calls.items() if call.request.replica is None}
        for number in calls.keys() - free.keys():
            replica = calls[number].request.replica
            assert replica is not None
            self._pinned.setdefault(replica, deque()).append(number)
        self._assignment.add(free, max((call.params.max_new_tokens for call in calls.values()), default=0))
        self._hand_out()

    def _use(self, endpoints: Sequence[Endpoint], version: int) -> None:
        self._set_version(version)
        self._client.is_paused = False
        new = [e for e in endpoints if e.index not in self._lanes or self._lanes[e.index].endpoint != e]
        gone = self._lanes.keys() - {e.index for e in endpoints} | {e.index for e in new} & self._lanes.keys()
        for index in gone:
            self._remove(self._lanes[index])
        for endpoint in new:
            self._lanes[endpoint.index] = Lane(endpoint)
        self._assignment.add_servers(e.index for e in new)
        self._hand_out()

    def _set_version(self, version: int) -> None:
        if version != self._client.version:
            self._assignment.forget_prefixes()
        self._client.version = version

    def _hand_out(self) -> None:
        """Send assigned requests to every server with room. Then move waiting requests of other servers to servers
        that still have room."""
        if self._client.aborts:
            return
        for lane in self._lanes.values():
            self._fill(lane)
        free, owed = [lane for lane in self._lanes.values() if self._room(lane)], self._assignment.owed
        while free and self._assignment.relieve(
            (lane := min(free, key=lambda lane: owed.of(lane.endpoint.index))).endpoint.index
        ):
            self._fill(lane)
            free = [lane for lane in free if self._room(lane)]
        busy = sum(bool(lane.calls) for lane in self._lanes.values())
        PROGRESS.note_servers(busy, len(self._lanes) if busy else 0)

    def _room(self, lane: Lane) -> int:
        return self._limits.max_inflight_sequences - len(lane.calls)

    def _fill(self, lane: Lane) -> None:
        pinned = self._pinned.pop(lane.endpoint.index, ())
        for number in (*pinned, *self._assignment.take(lane.endpoint.index, self._room(lane))):
            if not lane.calls:
                lane.last_answer = time.monotonic()
            lane.calls[number] = self._start(self._process(lane, number))

    async def _process(self, lane: Lane, number: int) -> None:
        """Send a request and store its answer, or the failure of the server."""
        call = self._calls[number]
        try:
            completion = await self._client.generate(lane.endpoint, call.request, call.params)
        except EngineError as refusal:
            lane.calls.pop(number, None)
            with self._news:
                self._report.refusal = str(refusal)
                self._news.notify_all()
            return
        except ServerFailure as failure:
            if number in lane.calls:  # otherwise its server failed a moment ago
                self._lose(lane, str(failure))
            return
        if lane.calls.pop(number, None) is None:
            return
        lane.last_answer = time.monotonic()
        self._on_tokens()
        if call.request.replica is None:
            self._assignment.answered(lane.endpoint.index, {number: len(completion.token_ids)})
        PROGRESS.add(SAMPLES, 1, tokens=len(completion.token_ids))
        self._hand_out()
        self._answer(number, completion)

    def _answer(self, number: int, completion: Completion) -> None:
        self._calls[number].future.set_result(completion)  # a callback may submit the next turn of an episode
        with self._news:
            del self._calls[number]
            self._report.answered += 1
            if not self._calls:
                self._news.notify_all()

    def _lose(self, lane: Lane, reason: str) -> None:
        """Remove a failed server, and report the failure."""
        with self._news:
            self._report.failures[lane.endpoint.index] = reason
            self._news.notify_all()
        self._remove(lane)
        self._hand_out()

    def _lose_all(self, reasons: Mapping[int, str]) -> None:
        for index in reasons.keys() & self._lanes.keys():
            self._remove(self._lanes[index])
        self._hand_out()

    def _remove(self, lane: Lane) -> None:
        """Remove a server. Its requests move to the other servers."""
        index, numbers = lane.endpoint.index, list(lane.calls)
        for task in (*lane.calls.values(), *([lane.check] if lane.check else [])):
            if task is not asyncio.current_task(self._loop):
                task.cancel()
        lane.calls.clear()
        del self._lanes[index]
        pinned = [number for number in numbers if self._calls[number].request.replica is not None]
        self._pinned.setdefault(index, deque()).extend(pinned)
        self._assignment.lose(index, [number for number in numbers if number not in pinned])

    def _drop_all(self) -> None:
        for lane in self._lanes.values():
            for task in lane.calls.values():
                task.cancel()
            lane.calls.clear()
        self._pinned.clear()
        self._assignment = RequestAssignment(sorted(self._lanes))
        self._client.aborts = False
        nothing = Completion((), (), truncated=False, weight_version=self._client.version, broken_off=True)
        for number in list(self._calls):
            self._answer(number, nothing)

    def _watch(self, lane: Lane) -> None:
        """Start a health check of a server that has not answered for a long time. Other servers continue to work."""
        silent = time.monotonic() - lane.last_answer
        if self._client.is_paused:
            lane.last_answer = time.monotonic()
        overdue = bool(lane.calls) and silent >= self._limits.stall_seconds and not self._client.is_paused
        if lane.check is None:
            if overdue:
                lane.check = self._start(self._client.is_well(lane.endpoint))
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
