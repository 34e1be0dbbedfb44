"""Protocols of generation engines and of engine factories. `rollout.engine` may name a custom class."""

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
    """Completions collected so far, by request number."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters that all requests of a rollout share."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    """Whether to take the most likely token. Log-probabilities remain those of the scaled distribution."""
    routing: RoutingShape | None = None
    """Sizes of the routing tensor, or None. If set, each answer contains the experts of each token. Only a
    `RoutingEngine` receives this parameter."""
    stop_texts: StopTexts | None = None
    """Texts that end a response in addition to stop tokens, or None. `stopping.stopped` finds the end of the
    response."""
    min_new_tokens: int = 0
    """Number of tokens before the first stop token may be sampled. Until then, log-probabilities are those of the
    distribution without the stop tokens."""

    @property
    def distribution(self) -> tuple[float, ...]:
        """Return the temperature, the minimum length, and the stop tokens if there is a minimum length.
        Log-probabilities of responses are comparable only if these values are equal."""
        return (self.temperature, self.min_new_tokens, *(self.stop_token_ids if self.min_new_tokens else ()))


@dataclass(frozen=True)
class GenerateRequest:
    """Request for one response to one prompt. The response depends on the weights, prompt, seed and parameters. The
    response does not depend on the other requests of a batch."""

    token_ids: tuple[int, ...]
    seed: int
    prompt_id: int
    """Number of the prompt over all ranks. All samples of a prompt share the number."""
    max_new_tokens: int | None = None
    """Token limit of this request, if lower than the limit of `SamplingParams`. None applies the shared limit."""
    min_new_tokens: int | None = None
    """Minimum length of this request in tokens, if lower than the minimum of `SamplingParams`. None applies the
    shared minimum."""

    def most_tokens(self, params: SamplingParams) -> int:
        """Return the maximum number of tokens of the response."""
        return params.max_new_tokens if self.max_new_tokens is None else min(self.max_new_tokens, params.max_new_tokens)

    @property
    def most_in_all(self) -> int | None:
        """Maximum number of tokens of prompt and response together, or None if the request has no limit."""
        return None if self.max_new_tokens is None else len(self.token_ids) + self.max_new_tokens

    def least_tokens(self, params: SamplingParams) -> int:
        """Return the number of tokens before a stop token may be sampled."""
        own = params.min_new_tokens if self.min_new_tokens is None else self.min_new_tokens
        return min(own, params.min_new_tokens, self.most_tokens(params))


@dataclass(frozen=True)
class Completion:
    """Response of an engine to one request."""

    token_ids: tuple[int, ...]
    """Sampled tokens. At least one token unless `broken_off`. The stop token or the tokens of the stop text are
    included."""
    logprobs: tuple[float, ...]
    """Log-probabilities in nats under the temperature-scaled distribution that was sampled."""
    truncated: bool
    """Whether the token limit of the request ended the response, rather than a stop token or a stop text. For an
    episode, the value describes the last turn."""
    weight_version: int
    routing: Tensor | None = field(default=None, compare=False)
    """Experts of each token of prompt and response, (T - 1, L, K) on the CPU, if requested. See `RoutingShape`."""
    episode: Episode | None = field(default=None, compare=False)
    """Episode, or None. If set, the tokens are those of all turns and of the replies of the environment, whose
    log-probabilities are 0. Engines never set this field."""
    broken_off: bool = False
    """Whether the response was interrupted, for example by `InFlightEngine.abort`. The completion then contains the
    tokens generated so far, possibly none."""
    stretches: tuple[tuple[int, int], ...] = ()
    """Weight version and number of tokens of each stretch, in order, if several weight versions made the tokens.
    `weight_version` is then the oldest version. Only a `HoldingEngine` sets this field."""


@dataclass(frozen=True)
class CacheUse:
    """Number of prompt tokens sent to a server, and the number of these tokens found in its prefix cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens with cached keys and values."""

    def __add__(self, other: CacheUse) -> CacheUse:
        return CacheUse(self.prompt_tokens + other.prompt_tokens, self.cached_tokens + other.cached_tokens)

    def __sub__(self, other: CacheUse) -> CacheUse:
        return CacheUse(self.prompt_tokens - other.prompt_tokens, self.cached_tokens - other.cached_tokens)


class Engine(Protocol):
    """A generation engine. The input is token ids, the output is token ids and log-probabilities."""

    on_tokens: Callable[[], None]
    """Callback for generated tokens. The engine may call it from any thread. The default has no effect."""

    @property
    def version(self) -> int:
        """Version of the engine's weights. The version is 0 before the first update."""

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        """Complete all requests and return the completions in order. All ranks call this method, including ranks
        without requests.

        Raises RuntimeError if the weights are incomplete. Raises Interrupted on every rank, within seconds, if the
        run is interrupted. `done` may then contain the finished completions, by request number.
        """

    def update_weights(self, named_tensors: WeightStream, version: int) -> None:
        """Load a complete set of weights by Hugging Face names. This is a collective of the world.

        Iterating over the stream yields every tensor on every rank. The `to` method of the stream sends tensors only
        to the ranks that need them. Every rank must consume the stream to the end, even after an error. Each
        parameter must arrive exactly once and with the correct shape. Otherwise an error lists the tensors, and
        `generate` raises until a complete set has arrived.
        """

    def close(self) -> None:
        """Release all resources."""


class EngineFactory(Protocol):
    """Callable that creates the engine of this rank. `rollout.engine` names a built-in factory, or the import path of
    a class or function."""

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
        """Create the engine of this rank. This is a collective of the world, called after the models are built.

        Args:
            config: All settings of the run.
            folder: Folder with config.json and the tokenizer of the actor. Weights arrive only through
                `update_weights`.
            stop_token_ids: Tokens that end a response, for engines that need the ids before the first
                `SamplingParams`.
            runtime: Rank and device, shared with the trainer.
            stop: Stop request of the run. `generate` polls `stop.asked` and calls `stop.check()` before it returns
                early.
            options: The setting `rollout.engine_options`.

        Raises ValueError for an error that the user can fix.
        """


@runtime_checkable
class RoutingEngine(Protocol):
    """An engine that reports the experts of each token of a mixture-of-experts model."""

    returns_routing: bool
    """Whether answers contain `routing` if `SamplingParams.routing` is set."""


@runtime_checkable
class AheadEngine(Protocol):
    """An engine that can generate during the update. `rollout.ahead: 1` requires this protocol."""

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> PendingCompletions:
        """Start the requests and return immediately."""

    def collect(self, pending: PendingCompletions, *, weights_changed: bool = False) -> list[Completion]:
        """Wait for the answers to `pending` and return the answers in order. All ranks call this method. Raises
        Interrupted as `generate` does.

        `weights_changed` indicates that the stream of the last update has newer weights than the engine. The engine
        then loads the newer weights if a server needs weights again.
        """


@runtime_checkable
class InFlightEngine(Protocol):
    """An engine that accepts requests at any time and can return unfinished responses. `rollout.ahead` of 2 or more
    requires this protocol."""

    def send(self, requests: Mapping[int, GenerateRequest], params: SamplingParams) -> None:
        """Start the requests and return immediately. This method is not a collective. Request numbers are local to
        the rank and must not be in flight already."""

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        """Return the new answers of this rank by request number. All ranks call this method.

        If there are no new answers, the method waits for at most `wait_seconds`. Requests interrupted by the restart
        of a server are returned as `broken_off`. Raises Interrupted as `generate` does.
        """

    def abort(self) -> dict[int, Completion]:
        """Interrupt all requests in flight. All ranks call this method.

        The method never raises Interrupted, because a stopping run calls it too. Returns answers as `finished` does,
        without waiting. A request without an answer has no tokens.
        """


@runtime_checkable
class HoldingEngine(InFlightEngine, Protocol):
    """An engine that can keep unfinished requests during a weight update."""

    @property
    def keeps_requests(self) -> bool:
        """Whether the engine keeps unfinished requests during a weight update. An answer with tokens of several
        weight versions then has `stretches`."""

    def hold(self) -> None:
        """Pause generation until the next `update_weights` has loaded new weights. All ranks call this method."""


class RequestStream(Protocol):
    """A stream of requests. Each request is answered as soon as possible."""

    def send(self, number: int, request: GenerateRequest) -> None:
        """Send a request. `TurnDriver.answered` receives the answer under the same number."""

    @property
    def is_over(self) -> bool:
        """Whether no server remains to answer."""


class Listener(Protocol):
    """Receiver of the answers of a `RequestStream`."""

    def answered(self, number: int, completion: Completion) -> None:
        """Process an answer. May be called from any thread."""


class TurnDriver(Listener, Protocol):
    """Driver of the episodes of a rank. Sends each turn after the answer to the previous turn."""

    def drive(self, stream: RequestStream) -> int:
        """Send pending requests and their follow-up requests. The loop ends if no request is left, if the stream is
        over, or if the run must stop. Returns the number of episodes that may still send requests."""


@runtime_checkable
class InFlightConversingEngine(InFlightEngine, Protocol):
    """An in-flight engine for the turns of episodes. Episodes continue between two calls of the trainer."""

    def listen(self, listener: Listener) -> None:
        """Deliver future answers to the listener as soon as they are complete. This method is not a collective.

        `finished` and `abort` then return only interrupted requests, and `send` may be called from any thread.
        """


@runtime_checkable
class ConversingEngine(Protocol):
    """An engine that answers each request as soon as possible while other requests arrive. No episode waits for a
    turn of another episode."""

    def converse(self, driver: TurnDriver, params: SamplingParams) -> None:
        """Answer all requests of the driver. All ranks call this method. Raises the exceptions of `generate`."""


@runtime_checkable
class ConversingAheadEngine(ConversingEngine, Protocol):
    """A conversing engine that generates during the update. `rollout.ahead: 1` requires this protocol if an
    environment runs the episodes."""

    def open_stream(self, driver: TurnDriver, params: SamplingParams) -> RequestStream:
        """Start to answer the requests of a stream and return immediately. This method is not a collective."""

    def finish_stream(
        self, driver: TurnDriver, stream: RequestStream, params: SamplingParams, *, weights_changed: bool = False
    ) -> None:
        """Answer the remaining requests of a stream, as in `ConversingEngine.converse`. All ranks call this method.
        See `AheadEngine.collect` for `weights_changed`."""


@runtime_checkable
class CachingEngine(Protocol):
    """An engine with a prefix cache, which stores the keys and values of prompts for later prompts with the same
    prefix."""

    cache_use: Mapping[int, CacheUse]
    """Cache use of the requests of this rank over the run, by server. All ranks have the same keys."""


@runtime_checkable
class TimedEngine(Protocol):
    """An engine that reports the transfer time of a weight update separately."""

    transfer_seconds: float
    """Seconds of the last transfer of all weights on this rank. Includes a single attempt."""


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can release its memory between rollouts."""

    def sleep(self) -> None:
        """Release the device memory until the next update. The weights may be lost."""


@runtime_checkable
class ServedEngine(SleepingEngine, Protocol):
    """An engine in separate processes, which can fail. After each update the engine answers a probe, which verifies
    the weights of the servers."""

    restarts: int
    """Number of server restarts over the run."""

    def sync_phases(self) -> dict[str, float]:
        """Return the seconds of each phase of the last weight update on this rank, summed over all attempts."""

    def probe(self, request: GenerateRequest, params: SamplingParams) -> dict[int, Completion]:
        """Return the answers of the servers of this rank by server number. All ranks call this method."""

    def judge(self, gaps: Mapping[int, float], tolerance_nats: float) -> float:
        """Return the largest gap in nats over the servers of all ranks. All ranks call this method. Raises if a gap
        exceeds the tolerance."""
