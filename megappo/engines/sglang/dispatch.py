"""Spreads requests over servers and brings every answer home, or says which server failed.

Requests go out in small groups, to the servers that `dealing` says. What waits behind a busy server is given to a free
one, what a dead or hung server owes to the others; what nobody could answer is left to the caller. Groups shrink
towards the end, so that servers finish together.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import torch
from torch import Tensor

from megappo.config.engine import LEAST_REQUEST_SECONDS, SGLangSettings
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.engines.sglang.client import HEALTH, Endpoint, ServerFailure
from megappo.engines.sglang.dealing import Deal
from megappo.engines.sglang.server import EngineError
from megappo.observe.progress import PROGRESS, SAMPLES
from megappo.runtime.interrupts import Stop
from megappo.types import RoutingShape

_LARGEST_GROUP = 32
"""With routing each answer travels alone: 2 KB a token from 48 layers with 8 experts each."""
_GREEDY_TOP_P = 1e-9
"""Leaves the most likely token only; log-probabilities stay those of the scaled distribution, which they are not with
SGLang's temperature 0."""
_WATCH_SECONDS = 1.0


@dataclass
class Outcome:
    """The answers and failures of a round of requests on this rank."""

    completions: dict[int, Completion] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    """Servers that failed, and how."""
    refusal: str | None = None
    """A request that a server will never take, which ends the run."""


@dataclass
class _Lane:
    """One server and what it owes."""

    endpoint: Endpoint
    sequences: int = 0
    last_answer: float = field(default_factory=time.monotonic)
    calls: dict[asyncio.Task[list[Completion]], list[int]] = field(default_factory=dict)
    check: asyncio.Task[bool] | None = None
    """Its health, asked for because it gave nothing for long."""

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """The asyncio tasks under way: requests, and the check of its health."""
        return [*self.calls, *([self.check] if self.check else [])]


class Round:
    """Requests on their way, in a thread of their own; the trainer may compute meanwhile."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        requests: dict[int, GenerateRequest],
        params: SamplingParams,
        version: int,
        settings: SGLangSettings,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_tokens` is called from the round's thread whenever a server has shown that it makes tokens."""
        self._on_tokens = on_tokens
        self._lanes = [_Lane(endpoint) for endpoint in endpoints]
        self._requests, self._params, self._version, self._settings = requests, params, version, settings
        # The longest first, so that none of them is left over at the end.
        order = sorted(requests, key=lambda i: -len(requests[i].token_ids))
        self._deal = Deal([e.index for e in endpoints], {i: requests[i].prompt_id for i in order})
        self._outcome = Outcome()
        self._largest_group = _LARGEST_GROUP if params.routing is None else 1
        if requests:
            PROGRESS.expect(SAMPLES, len(requests))
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._spread())
        pool = ThreadPoolExecutor(1, thread_name_prefix="megappo-rollout")
        self._finished = pool.submit(self._loop.run_until_complete, self._task)
        pool.shutdown(wait=False)

    def result(self, stop: Stop | None = None) -> Outcome:
        """Wait for everything that the servers can still give; each of them has deadlines. Where the run is asked to
        stop, what has come by then."""
        try:
            while stop is not None and not stop.asked and not self._finished.done():
                wait([self._finished], timeout=_WATCH_SECONDS)
            if stop is None or not stop.asked:
                self._finished.result()
        finally:
            self.cancel()
        return self._outcome

    def cancel(self) -> None:
        """Give up what is still on its way."""
        if not self._finished.done():
            self._loop.call_soon_threadsafe(self._task.cancel)
            wait([self._finished])
        if not self._loop.is_closed():
            self._loop.close()

    @property
    def _is_done(self) -> bool:
        """Nothing waits for an answer."""
        return not (self._deal.waiting or any(lane.calls for lane in self._lanes))

    def _news(self) -> list[asyncio.Future[Any]]:
        """What may bring more requests; with none, the round is over where nobody is asked any more."""
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
                        return  # nobody is left to ask
                    tasks = [*news, *(task for lane in self._lanes for task in lane.tasks)]
                    done, _ = await asyncio.wait(tasks, timeout=_WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    for call, lane in calls.items():
                        if call in done and call in lane.calls:  # else its server failed a moment ago
                            self._take(lane, call)
                    for lane in list(self._lanes):
                        self._watch(session, lane)
            finally:
                for lane in self._lanes:
                    for task in lane.tasks:
                        task.cancel()

    def _hand_out(self, session: aiohttp.ClientSession) -> None:
        """Give every server what was dealt to it, as far as it has room, and then what waits behind others."""
        for lane in self._lanes:
            self._fill(session, lane)
        free = [lane for lane in self._lanes if self._room(lane)]
        while free and self._deal.relieve((lane := min(free, key=lambda lane: lane.sequences)).endpoint.index):
            self._fill(session, lane)
            free = [lane for lane in free if self._room(lane)]

    def _room(self, lane: _Lane) -> int:
        return self._settings.max_inflight_sequences - lane.sequences

    def _fill(self, session: aiohttp.ClientSession, lane: _Lane) -> None:
        while group := self._deal.take(lane.endpoint.index, min(self._room(lane), self._largest_group)):
            if not lane.calls:
                lane.last_answer = time.monotonic()
            lane.calls[asyncio.ensure_future(self._ask(session, lane.endpoint, group))] = group
            lane.sequences += len(group)

    def _take(self, lane: _Lane, call: asyncio.Task[list[Completion]]) -> None:
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
        self._outcome.completions |= zip(group, completions, strict=True)
        PROGRESS.add(SAMPLES, len(group), tokens=sum(len(answer.token_ids) for answer in completions))

    def _lose(self, lane: _Lane, reason: str, owed: Sequence[int] = ()) -> None:
        """Take a server out; what it owes, `owed` and in its calls, waits for the others."""
        self._outcome.failures[lane.endpoint.index] = reason
        for task in lane.tasks:
            task.cancel()
        self._deal.lose(lane.endpoint.index, [*owed, *(i for group in lane.calls.values() for i in group)])
        lane.calls.clear()
        self._lanes.remove(lane)

    def _watch(self, session: aiohttp.ClientSession, lane: _Lane) -> None:
        """Have a server that has given nothing for long asked how it is, while the others go on."""
        silent = time.monotonic() - lane.last_answer
        overdue = bool(lane.calls) and silent >= self._settings.stall_timeout_seconds
        if lane.check is None:
            if overdue:
                lane.check = asyncio.ensure_future(self._is_well(session, lane.endpoint))
        elif lane.check.done():
            well, lane.check = lane.check.result(), None
            if well:
                lane.last_answer = time.monotonic()
                self._on_tokens()
            elif overdue:
                self._lose(lane, f"{lane.endpoint.name} gave nothing for {silent:.0f} seconds and is not well")

    async def _get(self, session: aiohttp.ClientSession, endpoint: Endpoint, path: str) -> bytes | None:
        """What it answers to a question about itself; None where it does not before the deadline, or not well."""
        try:
            async with asyncio.timeout(self._settings.health_timeout_seconds):
                async with session.get(f"{endpoint.url}{path}", headers=endpoint.headers) as answer:
                    return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def _is_well(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> bool:
        """Whether it generates a token before its deadline."""
        return await self._get(session, endpoint, HEALTH) is not None

    async def _works(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> bool:
        """Whether it makes tokens, and has requests to make them for."""
        if not await self._is_well(session, endpoint):
            return False
        answer = await self._get(session, endpoint, "/v1/loads?include=core")
        loads = json.loads(answer)["loads"] if answer is not None else []
        return any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def _has_lost(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, answer: asyncio.Task[list[Completion]]
    ) -> bool:
        """Whether it works on nothing, also a while later: what it says of itself may be some tokens old."""
        for pause_seconds in (self._settings.stall_timeout_seconds, 0.0):
            if await self._works(session, endpoint) or (await asyncio.wait([answer], timeout=pause_seconds))[0]:
                return False
        return True

    async def _ask(self, session: aiohttp.ClientSession, endpoint: Endpoint, group: list[int]) -> list[Completion]:
        """Have a group answered, however long it takes, as long as the server works on it. Raises as `_post`."""
        limit = self._settings.request_timeout_seconds or LEAST_REQUEST_SECONDS
        answer = asyncio.ensure_future(self._post(session, endpoint, group))
        try:
            while not (await asyncio.wait([answer], timeout=limit))[0]:
                if await self._has_lost(session, endpoint, answer):
                    raise ServerFailure(f"{endpoint.name} gave no response within {limit:g} seconds and works on none")
                self._on_tokens()
            return answer.result()
        finally:
            answer.cancel()

    async def _post(self, session: aiohttp.ClientSession, endpoint: Endpoint, group: list[int]) -> list[Completion]:
        """One request for a group. Raises ServerFailure for a failed server, EngineError for a refused request."""
        body = {
            "input_ids": [list(self._requests[i].token_ids) for i in group],
            "sampling_params": [_sampling(self._requests[i], self._params) for i in group],
            "return_logprob": True,
            "return_routed_experts": self._params.routing is not None,
        }
        try:
            async with session.post(f"{endpoint.url}/generate", json=body, headers=endpoint.headers) as answer:
                if 400 <= answer.status < 500:
                    raise EngineError(f"{endpoint.name} refused to generate: {(await answer.text())[:500]}")
                if answer.status != 200:
                    raise ServerFailure(f"{endpoint.name} failed to generate: {(await answer.text())[:500]}")
                content = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(f"{endpoint.name} broke off while it generated ({error!r})") from None
        with _no_collections():
            try:
                texts = json.loads(content)
            except ValueError:
                raise ServerFailure(f"{endpoint.name} answered what is no JSON: {content[:100]!r}") from None
            return self._read(texts, endpoint, group)

    def _read(self, texts: Sequence[dict[str, Any]], endpoint: Endpoint, group: list[int]) -> list[Completion]:
        """Check and convert the answers for a group. Raises as `_post`."""
        answers = [_completion(text, endpoint, self._version) for text in texts]
        if self._params.routing is None:
            return answers
        return [
            replace(answer, routing=_routing(text, self._requests[i], self._params.routing, endpoint))
            for i, answer, text in zip(group, answers, texts, strict=True)
        ]


@contextmanager
def _no_collections() -> Iterator[None]:
    """Without Python's garbage collector: an answer is a list for each of its tokens, of which some ten thousand make
    the collector walk through every object of the trainer, which takes longer than reading them. They end with the
    answer, by their count of references."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _sampling(request: GenerateRequest, params: SamplingParams) -> dict[str, Any]:
    """SGLang's parameters. The seed counts with deterministic inference only, together with the position of each token:
    without it SGLang makes no tensor of seeds, and draws from a generator of the server's."""
    chosen: dict[str, Any] = {
        "temperature": params.temperature,
        "max_new_tokens": request.most_tokens(params),
        "stop_token_ids": list(params.stop_token_ids),
        "sampling_seed": request.seed,
        "skip_special_tokens": False,
    }
    return chosen | ({"top_p": _GREEDY_TOP_P} if params.greedy else {})


def _completion(text: dict[str, Any], endpoint: Endpoint, version: int) -> Completion:
    """Check and convert one answer."""
    meta = text["meta_info"]
    logprobs = meta["output_token_logprobs"]
    ids = tuple(text["output_ids"])
    if meta["finish_reason"]["type"] not in ("stop", "length"):
        raise ServerFailure(f"{endpoint.name} broke a response off: {meta['finish_reason']}")
    versions = {span["version"] for span in meta.get("weight_versions") or ()} | {meta["weight_version"]}
    if versions != {str(version)}:
        raise ServerFailure(f"{endpoint.name} generated with weights {sorted(versions)}, not {version}")
    if not ids or [entry[1] for entry in logprobs] != list(ids):
        raise ServerFailure(f"{endpoint.name} gave {len(ids)} tokens with {len(logprobs)} log-probabilities")
    truncated = meta["finish_reason"]["type"] == "length"
    return Completion(ids, tuple(entry[0] for entry in logprobs), truncated, version)


def _routing(text: dict[str, Any], request: GenerateRequest, shape: RoutingShape, endpoint: Endpoint) -> Tensor:
    """(T - 1, L, K): SGLang has 32 bits for each number, in base64. Raises as `_post`."""
    told = base64.b64decode(text["meta_info"].get("routed_experts") or "")
    tokens = len(request.token_ids) + len(text["output_ids"]) - 1
    sizes = (tokens, shape.layers, shape.experts_per_token)
    if len(told) != 4 * math.prod(sizes):
        raise ServerFailure(f"{endpoint.name} gave no experts for each of {' x '.join(map(str, sizes))} places")
    numbers = torch.frombuffer(bytearray(told), dtype=torch.int32)
    is_expert = (numbers >= 0) & (numbers < shape.experts)
    return torch.where(is_expert, numbers, torch.iinfo(shape.dtype).max).to(shape.dtype).view(sizes)
