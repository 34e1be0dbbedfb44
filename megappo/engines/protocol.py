"""Protocols of generation engines, and of what makes one: `rollout.engine` may name a class of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from megappo.config import Config
    from megappo.engines.stopping import StopTexts
    from megappo.reshard.stream import WeightStream
    from megappo.runtime.interrupts import Stop
    from megappo.runtime.process import Runtime
    from megappo.types import Episode, RoutingShape


class PendingCompletions(Protocol):
    """Handle that `AheadEngine.submit` returns."""

    completions: dict[int, Completion]
    """Completions that were collected so far, by the number of their request."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters that all requests of a rollout share."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    """Whether the most likely token is taken; log-probabilities are still those of the scaled distribution."""
    routing: RoutingShape | None = None
    """Not None: each answer says which experts each token was sent to, in these sizes. Only a `RoutingEngine` is
    asked."""
    stop_texts: StopTexts | None = None
    """Not None: texts that end a response, besides stop tokens; `stopping.stopped` says where."""
    min_new_tokens: int = 0
    """No stop token is sampled before a response has this many tokens; log-probabilities are of the distribution
    without the stop tokens until then."""

    @property
    def distribution(self) -> tuple[float, ...]:
        """The temperature, the minimum length, and with a minimum the stop tokens: log-probabilities of responses with
        other values are of another distribution."""
        return (self.temperature, self.min_new_tokens, *(self.stop_token_ids if self.min_new_tokens else ()))


@dataclass(frozen=True)
class GenerateRequest:
    """Request for one response to one prompt. The response depends on weights, prompt, seed and parameters, not on the
    other requests of a batch."""

    token_ids: tuple[int, ...]
    seed: int
    prompt_id: int
    """Number of the prompt among those of all ranks; all samples of a prompt share it."""
    max_new_tokens: int | None = None
    """Limit of this request alone, where it is below the one of `SamplingParams`; None: no limit of its own."""
    min_new_tokens: int | None = None
    """Minimum of this request alone, where it is below the one of `SamplingParams`; None: no minimum of its own."""

    def most_tokens(self, params: SamplingParams) -> int:
        """Largest number of tokens that the response may have."""
        return params.max_new_tokens if self.max_new_tokens is None else min(self.max_new_tokens, params.max_new_tokens)

    @property
    def most_in_all(self) -> int | None:
        """Largest number of tokens of prompt and response together; None where only the parameters limit the
        response."""
        return None if self.max_new_tokens is None else len(self.token_ids) + self.max_new_tokens

    def least_tokens(self, params: SamplingParams) -> int:
        """Number of tokens that the response has before a stop token may be sampled."""
        own = params.min_new_tokens if self.min_new_tokens is None else self.min_new_tokens
        return min(own, params.min_new_tokens, self.most_tokens(params))


@dataclass(frozen=True)
class Completion:
    """Response of an engine to one request."""

    token_ids: tuple[int, ...]
    """Sampled tokens, at least one unless `broken_off`; the stop token, or the tokens of the text that ended the
    response, are included."""
    logprobs: tuple[float, ...]
    """Log-probabilities in nats, of the temperature-scaled distribution that was sampled."""
    truncated: bool
    """Whether the request's limit of tokens ended the response, neither a stop token nor a text. Of an episode: whether
    it ended the last turn."""
    weight_version: int
    routing: Tensor | None = field(default=None, compare=False)
    """Experts of each token of prompt and response, (T - 1, L, K) on the CPU, where the request asked for them; see
    `RoutingShape`."""
    episode: Episode | None = field(default=None, compare=False)
    """Not None: the tokens are those of all turns of an episode, with what the environment said between them, whose
    log-probabilities are 0. No engine sets it."""
    broken_off: bool = False
    """Whether the response was given up before its end, as `InFlightEngine.abort` does. It has the tokens that were
    made by then, possibly none."""
    stretches: tuple[tuple[int, int], ...] = ()
    """Weight version and number of tokens of each stretch, in order, where several versions made the tokens;
    `weight_version` is then the oldest. Only a `HoldingEngine` sets it."""


@dataclass(frozen=True)
class CacheUse:
    """Tokens of prompts that a server was asked for, and how many of them its prefix cache held."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values the server did not have to compute."""

    def __add__(self, other: CacheUse) -> CacheUse:
        return CacheUse(self.prompt_tokens + other.prompt_tokens, self.cached_tokens + other.cached_tokens)

    def __sub__(self, other: CacheUse) -> CacheUse:
        return CacheUse(self.prompt_tokens - other.prompt_tokens, self.cached_tokens - other.cached_tokens)


class Engine(Protocol):
    """A generation engine: token ids in, token ids and log-probabilities out."""

    on_tokens: Callable[[], None]
    """Callback, called from any thread whenever tokens are known to have been made; does nothing until it is set."""

    @property
    def version(self) -> int:
        """Version of the engine's weights; 0 before the first update."""

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        """Complete every request, in order. Every rank calls it, also one without requests.

        Raises RuntimeError without a complete set of weights, and Interrupted on every rank, within seconds,
        where the run is asked to stop; `done` may then have what is complete, by the number of its request.
        """

    def update_weights(self, named_tensors: WeightStream, version: int) -> None:
        """Take a whole set of weights by Hugging Face names; a collective of the world.

        Iterating over the stream gives every tensor to every rank; its `to` gives tensors only to the ranks that want
        them. Every rank must consume it to its end, whatever happens. Every parameter must arrive exactly once
        in its shape; otherwise an error names the tensors and `generate` refuses until a whole set arrived.
        """

    def close(self) -> None:
        """Release everything."""


class EngineFactory(Protocol):
    """Callable that makes this rank's engine: a class or function that `rollout.engine` names by its import path, or
    one of ours."""

    def __call__(
        self,
        *,
        config: Config,
        folder: Path,
        stop_token_ids: tuple[int, ...],
        runtime: Runtime,
        stop: Stop,
        **options: Any,
    ) -> Engine:
        """Make this rank's engine; a collective of the world, once the models of the run are built.

        Args:
            config: all settings of the run.
            folder: config.json and tokenizer of the actor's model; weights come by `update_weights` alone.
            stop_token_ids: tokens that end a response, for engines that need them before the first `SamplingParams`.
            runtime: this rank and its device, which the trainer uses too.
            stop: `generate` looks at `stop.asked` from time to time, and calls `stop.check()` when it gives up.
            options: `rollout.engine_options`.

        Raises ValueError for what a user can fix.
        """


@runtime_checkable
class RoutingEngine(Protocol):
    """An engine that says which experts of a mixture-of-experts model computed each token."""

    returns_routing: bool
    """Whether answers have `routing` where `SamplingParams.routing` asks for it."""


@runtime_checkable
class AheadEngine(Protocol):
    """An engine that can generate while the trainer computes, which `rollout.ahead: 1` needs."""

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> PendingCompletions:
        """Begin to complete requests and return at once."""

    def collect(self, pending: PendingCompletions, *, weights_changed: bool = False) -> list[Completion]:
        """Wait for the answers to `pending` and return them in order; every rank calls it. Raises Interrupted as
        `generate` does.

        `weights_changed`: the stream of the last update has newer weights than the engine. They are used if weights
        have to be sent to the engine again.
        """


@runtime_checkable
class InFlightEngine(Protocol):
    """An engine that takes requests at any time and can return unfinished responses, which `rollout.ahead` of 2 or more
    needs."""

    def send(self, requests: Mapping[int, GenerateRequest], params: SamplingParams) -> None:
        """Begin to complete requests and return at once; not a collective. The numbers are this rank's own, and none of
        them may be under way."""

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        """This rank's answers that were not returned before, by number; every rank calls it. Without any it waits for
        at most `wait_seconds`. Requests that were given up because a server is started again are among them as
        `broken_off`. Raises Interrupted as `generate` does."""

    def abort(self) -> dict[int, Completion]:
        """Break off all requests under way; every rank calls it. It never raises Interrupted, as a run that stops calls
        it too. Returns answers as `finished` does, without waiting; a request that is not among them has no tokens."""


@runtime_checkable
class HoldingEngine(InFlightEngine, Protocol):
    """An engine that may keep unfinished requests while its weights change."""

    @property
    def holds(self) -> bool:
        """Whether the engine keeps unfinished requests in a weight update. Answers then have `stretches` where several
        versions made their tokens."""

    def hold(self) -> None:
        """Make no tokens until the next `update_weights` has brought new weights; every rank calls it."""


class RequestStream(Protocol):
    """Takes requests one at a time and has each answered as soon as possible."""

    def send(self, number: int, request: GenerateRequest) -> None:
        """Ask for an answer, which comes to `TurnDriver.answered` under this number."""

    @property
    def is_over(self) -> bool:
        """Whether no server is left that could answer."""


class Listener(Protocol):
    """Receiver of the answers of a `RequestStream`."""

    def answered(self, number: int, completion: Completion) -> None:
        """Take an answer; called from any thread."""


class TurnDriver(Listener, Protocol):
    """Sends the turns of a rank's episodes one after the other, each once the answer to the one before is there."""

    def drive(self, stream: RequestStream) -> int:
        """Send the requests that wait and those that follow from answers, until none is left, the stream is over or the
        run is asked to stop. Returns the number of episodes that may still send requests."""


@runtime_checkable
class InFlightConversingEngine(InFlightEngine, Protocol):
    """An in-flight engine that answers turns of episodes, which continue between two calls of the trainer."""

    def listen(self, listener: Listener) -> None:
        """Deliver answers to the listener as soon as they exist, from now on. `finished` and `abort` then return only
        requests that were given up, and `send` may be called from any thread. Not a collective."""


@runtime_checkable
class ConversingEngine(Protocol):
    """An engine that answers each request as soon as it can while others arrive, so that no episode waits for the turn
    of another."""

    def converse(self, driver: TurnDriver, params: SamplingParams) -> None:
        """Answer the driver's requests until it has none left; every rank calls it. Raises as `generate` does."""


@runtime_checkable
class ConversingAheadEngine(ConversingEngine, Protocol):
    """A conversing engine that generates while the trainer computes, which `rollout.ahead: 1` needs where an
    environment plays episodes."""

    def open_stream(self, driver: TurnDriver, params: SamplingParams) -> RequestStream:
        """Begin to answer the requests of a stream and return at once; not a collective."""

    def finish_stream(
        self, driver: TurnDriver, stream: RequestStream, params: SamplingParams, *, weights_changed: bool = False
    ) -> None:
        """Answer the remaining requests of a stream, as `ConversingEngine.converse`; every rank calls it.
        `weights_changed` as in `AheadEngine.collect`."""


@runtime_checkable
class CachingEngine(Protocol):
    """An engine with a prefix cache: it keeps keys and values of prompts for later ones that begin alike."""

    cache_use: Mapping[int, CacheUse]
    """Cache use of this rank's requests over the run, by server; all ranks have the same servers as keys."""


@runtime_checkable
class TimedEngine(Protocol):
    """An engine that reports the transfer time of a weight update separately."""

    transfer_seconds: float
    """Seconds that this rank spent in its last transfer of all weights (a single attempt)."""


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can release its memory between rollouts."""

    def sleep(self) -> None:
        """Release the device's memory until the next update; the weights may be lost."""


@runtime_checkable
class ServedEngine(SleepingEngine, Protocol):
    """An engine in separate processes, which can fail. After every update it answers a probe, which shows that it holds
    the weights that were sent."""

    restarts: int
    """Number of restarts of servers over the run."""

    def sync_phases(self) -> dict[str, float]:
        """Seconds of the last weight update on this rank by phase, summed over all attempts."""

    def probe(self, request: GenerateRequest, params: SamplingParams) -> dict[int, Completion]:
        """Answers of the servers that this rank looks after, by the servers' numbers; every rank calls it."""

    def judge(self, gaps: Mapping[int, float], tolerance_nats: float) -> float:
        """The largest gap in nats over all ranks' servers; every rank calls it. Raises where one exceeds the
        tolerance."""
