"""Substitutes for tests of episodes: engines without a model, and the objects of a pool of episodes."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

from tokenizers import decoders
from transformers import AddedToken, PreTrainedTokenizerFast

from megappo.config.sections.engine import EngineCapabilities
from megappo.config.sections.environment import EnvironmentSettings
from megappo.engines.base import BatchEngine
from megappo.engines.protocol import Completion, GenerateRequest, PauseMode, SamplingParams, SyncReport
from megappo.engines.requests import RequestTracker
from megappo.engines.stretches import stopped
from megappo.environments.chat import ChatTokens
from megappo.environments.episodes import EpisodePool
from megappo.environments.gateway.server import Gateway
from megappo.environments.protocol import Environment
from megappo.environments.registry import EnvironmentContext
from megappo.environments.session import SharedEpisodeState
from megappo.environments.tools.tool_pool import ToolPool
from megappo.runtime.watch.interrupts import NeverStop, Stop
from megappo.types import Prompt
from tests.support.data import character_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;=+-*/()<>|_{}\"'\n?!"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

Respond = Callable[[GenerateRequest], str]


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each character and for the delimiters of chat templates."""
    made = character_tokenizer(template, ALPHABET)
    made.backend_tokenizer.decoder = decoders.Fuse()
    made.add_special_tokens({"additional_special_tokens": [AddedToken(text, special=True) for text in SPECIAL]})
    return made


TOKENIZER = tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
MOST_PROMPT_TOKENS = 1000
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=200, stop_token_ids=(END,))


class SayingEngine(BatchEngine):
    """An engine that answers with the result of a function of the request. The log-probabilities are the negative
    token ids."""

    def __init__(self, respond: Respond, stop: Stop | None = None) -> None:
        super().__init__(stop)
        self.version, self.respond, self.rounds = 7, respond, list[list[GenerateRequest]]()
        self.stop: Stop = stop if stop is not None else NeverStop()

    def answer(self, request: GenerateRequest, params: SamplingParams) -> Completion:
        ids = [*TOKENIZER(self.respond(request), add_special_tokens=False)["input_ids"], END]
        token_ids = ids[: request.most_tokens(params)]
        answer = Completion(
            tuple(token_ids), tuple(-float(i) for i in token_ids), len(token_ids) < len(ids), self.version
        )
        return stopped(answer, params)

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        self.rounds.append(list(requests))
        return enumerate([self.answer(request, params) for request in requests])

    def update_weights(self, named_tensors: Any, version: int) -> SyncReport:
        self.version = version
        return SyncReport(())


@functools.cache
def _delays() -> asyncio.AbstractEventLoop:
    """Return an event loop in a separate thread for delayed calls."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class PromptEngine(SayingEngine):
    """Answers each request after a separate delay while other requests arrive, as servers do."""

    capabilities = EngineCapabilities(concurrent=True)

    def __init__(
        self,
        respond: Respond,
        delay: Callable[[GenerateRequest], float] = lambda _: 0.0,
        stop: Stop | None = None,
    ) -> None:
        super().__init__(respond, stop)
        self.delay = delay
        self.is_delayed: Callable[[GenerateRequest], bool] = lambda _: False
        """Returns whether the answer to a request must be delayed further."""
        self._running: set[Future[Completion]] = set()

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        futures = [Future[Completion]() for _ in requests]
        self._running |= {*futures}
        for request, future in zip(requests, futures, strict=True):
            deliver = functools.partial(self._deliver, request, params, future)
            _delays().call_soon_threadsafe(_delays().call_later, self.delay(request), deliver)
        return futures

    def _deliver(self, request: GenerateRequest, params: SamplingParams, future: Future[Completion]) -> None:
        if self.is_delayed(request):
            _delays().call_later(0.01, self._deliver, request, params, future)
        else:
            self._running.discard(future)
            future.set_result(self.answer(request, params))

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        wait([*self._running], wait_seconds)
        self.stop.check()


class FlyingEngine(SayingEngine):
    """Answers all requests at each poll. A pause returns one token of each request. Requests of the conversations in
    `stuck` are never answered completely."""

    capabilities = EngineCapabilities(concurrent=True)

    def __init__(self, respond: Respond, stuck: Collection[int] = ()) -> None:
        super().__init__(respond)
        self.sent: list[GenerateRequest] = []
        self._stuck, self._lock = stuck, threading.Lock()
        self._running: list[tuple[GenerateRequest, list[int], Future[Completion]]] = []
        self._rests: dict[tuple[int, ...], list[int]] = {}
        """Tokens after an interruption, by the tokens of the continued request."""

    @property
    def has_requests(self) -> bool:
        """Return whether a request is in flight."""
        return bool(self._running)

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        futures = [Future[Completion]() for _ in requests]
        with self._lock:
            for request, future in zip(requests, futures, strict=True):
                ids = self._rests.get(request.token_ids) or list(self.answer(request, params).token_ids)
                self.sent.append(request)
                self._running.append((request, ids, future))
        return futures

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        with self._lock:
            answered = [each for each in self._running if each[0].conversation not in self._stuck]
            self._running = [each for each in self._running if each not in answered]
        for _, ids, future in answered:
            future.set_result(self._completion(ids))

    def pause(self, mode: PauseMode) -> None:
        with self._lock:
            running, self._running = self._running, []
        for request, ids, future in running:
            self._rests[request.token_ids + tuple(ids[:1])] = ids[1:]
            future.set_result(self._completion(ids[:1], broken_off=len(ids) > 1))

    def _completion(self, ids: Sequence[int], *, broken_off: bool = False) -> Completion:
        return Completion(tuple(ids), (-float(self.version),) * len(ids), False, self.version, broken_off=broken_off)


def episode_pool(
    environment: Environment,
    engine: SayingEngine,
    *,
    template: str | None = None,
    tracker: RequestTracker | None = None,
    **limits: Any,
) -> EpisodePool:
    """Return a pool for episodes of an environment with an engine."""
    settings = EnvironmentSettings(**limits)
    encoder = TOKENIZER if template is None else tokenizer(template)
    role = getattr(environment, "role", "user")
    chat = None if template is None else ChatTokens(encoder, (END,))
    tools = ToolPool(getattr(environment, "tools", {}), settings.tools)
    gateway = Gateway(settings.gateway_host)
    shared = SharedEpisodeState(settings, encoder, len(encoder), chat, role, tools, gateway, MOST_PROMPT_TOKENS)
    requests = tracker if tracker is not None else RequestTracker(engine, len(encoder))
    return EpisodePool(EnvironmentContext(environment, shared), engine, requests, engine.stop)


def prompts_and_requests(
    count: int, text: str = "go ", answer: str | None = None
) -> tuple[list[Prompt], list[GenerateRequest]]:
    """Return prompts with a text, and a request for each prompt."""
    ids = tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    prompts = [Prompt(i, ids, text, answer, {}) for i in range(count)]
    return prompts, [GenerateRequest(ids, seed=1000 + i, prompt_id=i) for i in range(count)]


def text_of(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=False))
