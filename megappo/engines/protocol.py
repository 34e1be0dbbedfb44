"""The interface of generation engines and of engine factories. `rollout.engine` or `rollout.servers.kind` may name a
custom class.

An engine receives token ids and returns token ids with log-probabilities. Custom engines extend
`megappo.engines.base.EngineBase`, or `BatchEngine` to generate in the thread of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from megappo.config.sections.engine import EngineCapabilities
from megappo.runtime.ranks.objects import all_gather_objects

if TYPE_CHECKING:
    from megappo.config import Config
    from megappo.models.stop_texts import StopTexts
    from megappo.reshard.stream import WeightStream
    from megappo.runtime.process import Runtime
    from megappo.runtime.watch.interrupts import Stop
    from megappo.types import Episode, RoutingShape


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters that all requests of a rollout share."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    """Whether to take the most likely token. Log-probabilities remain those of the scaled distribution."""
    routing: RoutingShape | None = None
    """Sizes of the routing tensor, or None. If set, each answer contains the experts of each token. Only an
    engine with the capability `routing` receives this parameter."""
    stop_texts: StopTexts | None = None
    """Texts that end a response in addition to stop tokens, or None. `stretches.stopped` finds the end of the
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

    conversation: int | None = None
    """Number that all turns of an episode share, or None for a single response. A server with a prefix cache should
    receive all turns of an episode."""
    replica: int | None = None
    """Number of the only replica that may answer, from `Engine.replicas`, or None for any replica."""

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
    """Whether the response was interrupted, by `Engine.pause`. The completion then contains the
    tokens generated so far, possibly none."""
    stretches: tuple[tuple[int, int], ...] = ()
    """Weight version and number of tokens of each stretch, in order, if several weight versions made the tokens.
    `weight_version` is then the oldest version. Only engines with the capability
    `keeps_requests` set this field."""


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


PauseMode = Literal["abort", "keep"]
"""Treatment of unfinished requests during a pause. `abort`: each request is answered with the tokens generated so far
(`Completion.broken_off`). `keep`: the engine keeps the requests and continues them under the next weights."""


@dataclass(frozen=True)
class EngineUsage:
    """Cumulative counts of an engine over the run."""

    restarts: int = 0
    """Number of server restarts."""
    cache: Mapping[int, CacheUse] = field(default_factory=dict)
    """Use of the prefix caches by the requests of this rank, by replica. All ranks have the same keys."""


@dataclass(frozen=True)
class SyncReport:
    """Durations of a weight update."""

    seconds: tuple[tuple[Mapping[str, float], ...], ...]
    """Seconds by phase, for each attempt of each rank. The first index is the rank. The phase `transfer` includes all
    phases that move weights."""

    @classmethod
    def gather(cls, attempts: Sequence[Mapping[str, float]]) -> SyncReport:
        """Return the report of all ranks from the attempts of each rank. A collective of the world."""
        return cls(tuple(all_gather_objects(tuple(attempts))))

    @property
    def transfer_seconds(self) -> float:
        """Seconds of the transfer in the last attempt on the slowest rank."""
        return max((attempts[-1].get("transfer", 0.0) for attempts in self.seconds if attempts), default=0.0)

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase except `transfer` on the slowest rank, summed over all attempts."""
        names = {name: None for attempts in self.seconds for attempt in attempts for name in attempt}
        return {
            name: max(sum(attempt.get(name, 0.0) for attempt in attempts) for attempts in self.seconds)
            for name in names
            if name != "transfer"
        }


class Engine(Protocol):
    """A generation engine."""

    on_tokens: Callable[[], None]
    """Callback for generated tokens. The engine may call it from any thread. The default has no effect."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Optional features of the engine."""

    @property
    def version(self) -> int:
        """Version of the engine's weights. The version is 0 before the first update."""

    @property
    def usage(self) -> EngineUsage:
        """Cumulative counts over the run."""

    @property
    def replicas(self) -> Sequence[int]:
        """Numbers of the replicas that this rank manages. After each update, each replica answers a probe."""

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        """Start the requests and return immediately. Each future receives the completion of one request.

        Any thread may call this method, at any time. The method is not a collective. Raises RuntimeError if the
        weights are incomplete.
        """

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        """Advance the submitted requests. All ranks call this method, including ranks without requests.

        An engine without the capability `concurrent` computes all submitted requests. Other engines wait for at most
        `wait_seconds` until all requests of this rank are answered, and replace failed replicas.

        `weights_changed` indicates that the stream of the last update has newer weights than the engine. A replaced
        replica then receives the newer weights, and `version` increases, after all running requests are answered.

        Raises Interrupted on every rank, within seconds, if the run is interrupted. Raises RunError on every rank if
        the engine cannot answer.
        """

    def pause(self, mode: PauseMode) -> None:
        """Stop generating before a weight update or the end of the run. All ranks call this method.

        With `abort`, all futures of this rank are complete afterwards. The method never raises Interrupted, because a
        stopping run calls the method too. `keep` requires the capability `keeps_requests`.
        """

    def update_weights(self, named_tensors: WeightStream, version: int) -> SyncReport:
        """Load a complete set of weights by Hugging Face names, and continue paused requests. This is a collective of
        the world.

        Iterating over the stream yields every tensor on every rank. The `to` method of the stream sends tensors only
        to the ranks that need them. Every rank must consume the stream to the end, even after an error. Each
        parameter must arrive exactly once and with the correct shape. Otherwise an error lists the tensors, and
        `submit` raises until a complete set has arrived.
        """

    def sleep(self) -> None:
        """Release the device memory until the next update. The weights may be lost."""

    def close(self) -> None:
        """Release all resources."""


class EngineFactory(Protocol):
    """Callable that creates the engine of this rank. `rollout.engine` or `rollout.servers.kind` names a built-in
    factory, or the import path of a class or function. The attribute `capabilities` of the class or function is a
    `megappo.config.sections.engine.EngineCapabilities`. Without the attribute, the engine has no capability."""

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
            stop: Stop request of the run. `poll` reads `stop.requested` and calls `stop.check()` before it
                returns.
            options: The setting `rollout.engine_options`.

        Raises ValueError for an error that the user can fix.
        """
