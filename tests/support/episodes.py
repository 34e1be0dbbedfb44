"""Substitutes for tests of episodes: engines without a model, and the objects of a runner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

from tokenizers import decoders
from transformers import AddedToken, PreTrainedTokenizerFast

from megappo.config.environment import EnvironmentSettings
from megappo.engines.protocol import Completion, GenerateRequest, Listener, RequestStream, SamplingParams, TurnDriver
from megappo.engines.stopping import stopped
from megappo.environments.chat import ChatTokens
from megappo.environments.gateway.server import Gateway
from megappo.environments.protocol import Environment
from megappo.environments.registry import EnvironmentContext
from megappo.environments.runner import EpisodeRunner
from megappo.environments.session import SharedEpisodeState
from megappo.environments.tool_pool import ToolPool
from megappo.runtime.interrupts import NeverStop
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


class SayingEngine:
    """An engine that answers with the result of a function of the request. The log-probabilities are the negative
    token ids."""

    version = 7

    def __init__(self, respond: Respond) -> None:
        self.respond, self.rounds = respond, list[list[GenerateRequest]]()
        self.on_tokens: Callable[[], None] = lambda: None

    def answer(self, request: GenerateRequest, params: SamplingParams) -> Completion:
        ids = [*TOKENIZER(self.respond(request), add_special_tokens=False)["input_ids"], END]
        token_ids = ids[: request.most_tokens(params)]
        answer = Completion(
            tuple(token_ids), tuple(-float(i) for i in token_ids), len(token_ids) < len(ids), self.version
        )
        return stopped(answer, params)

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        self.rounds.append(list(requests))
        return [self.answer(request, params) for request in requests]

    def update_weights(self, named_tensors: Any, version: int) -> None:
        self.version = version

    def close(self) -> None:
        """Do nothing, because the engine has no resources."""


class PromptEngine(SayingEngine):
    """Answers each request after a separate delay while other requests arrive, as servers do."""

    def __init__(self, respond: Respond, delay: Callable[[GenerateRequest], float] = lambda _: 0.0) -> None:
        super().__init__(respond)
        self.delay = delay
        self.keeps_requests: Callable[[GenerateRequest], bool] = lambda _: False
        """Returns whether the answer to a request must be delayed."""
        self.left = 0
        """Number of unfinished episodes at the end of the last driver."""

    def converse(self, driver: TurnDriver, params: SamplingParams) -> None:
        self.finish_stream(driver, self.open_stream(driver, params), params)

    def open_stream(self, driver: TurnDriver, params: SamplingParams) -> RequestStream:
        return _Delayed(self, driver, params)

    def finish_stream(
        self, driver: TurnDriver, stream: RequestStream, params: SamplingParams, *, weights_changed: bool = False
    ) -> None:
        assert isinstance(stream, _Delayed)
        try:
            self.left = driver.drive(stream)
        finally:
            stream.close()


class FlyingEngine(SayingEngine):
    """Answers all requests at each call of `finished`. `abort` returns one token of each request."""

    def __init__(self, respond: Respond, stuck: Collection[int] = ()) -> None:
        super().__init__(respond)
        self.sent: list[tuple[int, GenerateRequest]] = []
        self._stuck, self._rest, self._lock = stuck, dict[int, list[int]](), threading.Lock()
        self._under_way: dict[int, tuple[GenerateRequest, list[int]]] = {}
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    @property
    def has_requests(self) -> bool:
        """Return whether a request is in flight."""
        return bool(self._under_way)

    def send(self, requests: Mapping[int, GenerateRequest], params: SamplingParams) -> None:
        with self._lock:
            for number, request in requests.items():
                assert number not in self._under_way
                self.sent.append((number, request))
                whole = list(self.answer(request, params).token_ids)
                self._under_way[number] = request, self._rest.pop(number, whole)

    def _take(self, number: int, tokens: int | None) -> Completion:
        _, ids = self._under_way.pop(number)
        token_ids, rest = ids[:tokens], ids[len(ids[:tokens]) :]
        if rest:
            self._rest[number] = rest
        logprobs = tuple(-float(self.version) for _ in token_ids)
        return Completion(tuple(token_ids), logprobs, False, self.version, broken_off=bool(rest))

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        with self._lock:
            completions = {
                number: self._take(number, None) for number in [*self._under_way] if number not in self._stuck
            }
        for number, completion in completions.items():
            assert self._listener is not None
            self._listener.answered(number, completion)
        return {}

    def abort(self) -> dict[int, Completion]:
        with self._lock:
            return {number: self._take(number, 1) for number in [*self._under_way]}


class _Delayed(RequestStream):
    is_over = False

    def __init__(self, engine: PromptEngine, driver: TurnDriver, params: SamplingParams) -> None:
        self._engine, self._driver, self._params = engine, driver, params
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def send(self, number: int, request: GenerateRequest) -> None:
        def answer() -> None:
            if self._engine.keeps_requests(request):
                self._loop.call_later(0.01, answer)
            else:
                self._driver.answered(number, self._engine.answer(request, self._params))

        self._loop.call_soon_threadsafe(self._loop.call_later, self._engine.delay(request), answer)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def runner(
    environment: Environment, engine: SayingEngine, *, template: str | None = None, stop: Any = None, **limits: Any
) -> EpisodeRunner:
    """Return a runner for episodes of an environment with an engine."""
    settings = EnvironmentSettings(**limits)
    encoder = TOKENIZER if template is None else tokenizer(template)
    role = getattr(environment, "role", "user")
    chat = None if template is None else ChatTokens(encoder, (END,))
    pool = ToolPool(getattr(environment, "tools", {}), settings.tools)
    gateway = Gateway(settings.gateway_host)
    shared = SharedEpisodeState(settings, encoder, len(encoder), chat, role, pool, gateway, MOST_PROMPT_TOKENS)
    return EpisodeRunner(EnvironmentContext(environment, shared), engine, stop or NeverStop())


def prompts_and_requests(
    count: int, text: str = "go ", answer: str | None = None
) -> tuple[list[Prompt], list[GenerateRequest]]:
    """Return prompts with a text, and a request for each prompt."""
    ids = tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    prompts = [Prompt(i, ids, text, answer, {}) for i in range(count)]
    return prompts, [GenerateRequest(ids, seed=1000 + i, prompt_id=i) for i in range(count)]


def text_of(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=False))
