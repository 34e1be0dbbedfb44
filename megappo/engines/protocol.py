"""What every generation engine can do, and how one is made: `rollout.engine` may name a class of your own."""

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
    """What `AheadEngine.submit` returns."""

    completions: dict[int, Completion]
    """Those that are collected, by the number of their request."""


@dataclass(frozen=True)
class SamplingParams:
    """How to generate."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    greedy: bool = False
    """Take the most likely token; log-probabilities are still those of the scaled distribution."""
    routing: RoutingShape | None = None
    """Not None: say which experts each token was sent to, in these sizes. Only a `RoutingEngine` is asked."""
    stop_texts: StopTexts | None = None
    """Not None: texts that end a response too; `stopping.stopped` says where."""
    min_new_tokens: int = 0
    """Stop tokens are not sampled before there are so many; log-probabilities are of the distribution without them."""


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt. The response depends on weights, prompt, seed and parameters, not on its neighbours."""

    token_ids: tuple[int, ...]
    seed: int
    prompt_id: int
    """Number of its prompt among those of all ranks; all samples of a prompt have the same."""
    max_new_tokens: int | None = None
    """Fewer than the parameters' for this request alone; None: as many."""
    min_new_tokens: int | None = None
    """Fewer as well."""

    def most_tokens(self, params: SamplingParams) -> int:
        """How many it may get."""
        return params.max_new_tokens if self.max_new_tokens is None else min(self.max_new_tokens, params.max_new_tokens)

    @property
    def most_in_all(self) -> int | None:
        """Most tokens of prompt and response together; None where only the parameters limit the response."""
        return None if self.max_new_tokens is None else len(self.token_ids) + self.max_new_tokens

    def least_tokens(self, params: SamplingParams) -> int:
        """How many it gets before a stop token may be sampled."""
        own = params.min_new_tokens if self.min_new_tokens is None else self.min_new_tokens
        return min(own, params.min_new_tokens, self.most_tokens(params))


@dataclass(frozen=True)
class Completion:
    """One response."""

    token_ids: tuple[int, ...]
    """As sampled, at least one; the stop token, or those of the text that ended it, are included."""
    logprobs: tuple[float, ...]
    """Natural logarithms, of the temperature-scaled distribution that was sampled."""
    truncated: bool
    """The length limit ended it, neither a stop token nor a text."""
    weight_version: int
    routing: Tensor | None = field(default=None, compare=False)
    """(T - 1, L, K) in the host's memory, of prompt and response, where it was asked for; see `RoutingShape`."""
    episode: Episode | None = field(default=None, compare=False)
    """Not None: the answers of all turns of an episode, with what the environment said between them, which has the
    log-probability 0. No engine gives it."""
    broken_off: bool = False
    """Given up before its end, as `InFlightEngine.abort` does: the tokens that there were by then, of which there may
    be none."""
    stretches: tuple[tuple[int, int], ...] = ()
    """Weight version and number of tokens, one stretch after the other, where several versions made them; then
    `weight_version` is the oldest. No engine gives it but a `HoldingEngine`."""


@dataclass(frozen=True)
class CacheUse:
    """How much of what a server was asked for stood in its prefix cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Those of them whose keys and values it did not have to compute."""

    def __add__(self, other: CacheUse) -> CacheUse:
        return CacheUse(self.prompt_tokens + other.prompt_tokens, self.cached_tokens + other.cached_tokens)

    def __sub__(self, other: CacheUse) -> CacheUse:
        return CacheUse(self.prompt_tokens - other.prompt_tokens, self.cached_tokens - other.cached_tokens)


class Engine(Protocol):
    """Token ids in, token ids and log-probabilities out."""

    on_tokens: Callable[[], None]
    """Called, from any thread, whenever tokens are known to have been made; does nothing until it is set."""

    @property
    def version(self) -> int:
        """Version of the weights it holds; 0 before the first update."""
        ...

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        """Complete every request, in order; every rank calls it, if only with no requests.

        Raises RuntimeError without a complete set of weights, and Interrupted on every rank, within seconds,
        where the run is asked to stop; `done` may then have what is complete, by the number of its request.
        """
        ...

    def update_weights(self, named_tensors: WeightStream, version: int) -> None:
        """Take a whole set of weights by Hugging Face names; a collective of the world.

        Iterated over, the stream gives every tensor to every rank; its `to` gives what is wanted to the ranks that want
        it, and nothing to others. It is consumed to its end whatever happens. Every parameter must arrive exactly once
        in its shape; otherwise an error names the tensors and `generate` refuses until a whole set arrived.
        """
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class EngineFactory(Protocol):
    """A class or a function that `rollout.engine` names by its import path, and what makes our own engines."""

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
            stop_token_ids: what ends a response, for who must know before `SamplingParams` say it.
            runtime: this rank and its device, which the trainer uses too.
            stop: what `generate` asks from time to time; who gives up for it comes to `stop.check()`.
            options: `rollout.engine_options`.

        Raises ValueError for what a user can fix.
        """
        ...


@runtime_checkable
class RoutingEngine(Protocol):
    """An engine of a model with experts that says which of them computed each token."""

    returns_routing: bool
    """Whether it does, where `SamplingParams.routing` asks for it."""


@runtime_checkable
class AheadEngine(Protocol):
    """An engine that can generate while the trainer computes, which `rollout.ahead: 1` needs."""

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> PendingCompletions:
        """Begin to complete requests and return at once."""
        ...

    def collect(self, pending: PendingCompletions, *, weights_changed: bool = False) -> list[Completion]:
        """Wait for them, in order; every rank calls it. Raises Interrupted as `generate` does.

        `weights_changed`: the stream of the last update has newer weights than the engine, which take over if the
        engine has to be given weights again.
        """
        ...


@runtime_checkable
class InFlightEngine(Protocol):
    """An engine that takes requests at any time and gives back what it has begun, which `rollout.ahead: 2` and more
    need."""

    def send(self, requests: Mapping[int, GenerateRequest], params: SamplingParams) -> None:
        """Begin to complete requests and return at once; a rank calls it when it likes. Its numbers are its own, none
        of them under way."""
        ...

    def finished(self, wait_seconds: float) -> dict[int, Completion]:
        """This rank's answers that it has not been given yet, by number; every rank calls it. Where there are none it
        waits, at most so long. What had to be given up, because a server is started again, is among them as
        `broken_off`. Raises Interrupted as `generate` does."""
        ...

    def abort(self) -> dict[int, Completion]:
        """Give up everything that is under way; every rank calls it, also of a run that stops, so that it never raises
        Interrupted. As `finished`, without waiting; what is not among the answers has no tokens."""
        ...


@runtime_checkable
class HoldingEngine(InFlightEngine, Protocol):
    """An engine that may keep what is under way while its weights change."""

    @property
    def holds(self) -> bool:
        """Whether it does. Its answers have `stretches` then, where several versions made their tokens."""
        ...

    def hold(self) -> None:
        """Make no tokens until the next `update_weights` has given it others; every rank calls it."""
        ...


class RequestStream(Protocol):
    """Takes requests one at a time, and has each answered as soon as it can be."""

    def send(self, number: int, request: GenerateRequest) -> None:
        """Ask for an answer, which comes to `TurnDriver.answered` under this number."""
        ...

    @property
    def is_over(self) -> bool:
        """Nobody is left who could answer."""
        ...


class Listener(Protocol):
    """Who is told the answers of a stream."""

    def answered(self, number: int, completion: Completion) -> None:
        """Take an answer; called from any thread."""
        ...


class TurnDriver(Listener, Protocol):
    """Who asks one thing after the other: the episodes of a rank."""

    def drive(self, stream: RequestStream) -> int:
        """Send over the stream what waits for an answer and what comes up, until nothing will any more, the stream is
        over or the run is asked to stop; gives the number of those who may still ask."""
        ...


@runtime_checkable
class InFlightConversingEngine(InFlightEngine, Protocol):
    """One that answers the turns of episodes that are in flight, which go on between two calls of the trainer's."""

    def listen(self, listener: Listener) -> None:
        """From now on answers come to the listener as soon as they are there, and `finished` and `abort` give only what
        has to be given up; `send` may be called from any thread. Not a collective."""
        ...


@runtime_checkable
class ConversingEngine(Protocol):
    """An engine that answers each request as soon as it can while others come, so that no episode waits for another's
    turn."""

    def converse(self, driver: TurnDriver, params: SamplingParams) -> None:
        """Answer what is asked until nothing is any more; every rank calls it. Raises as `generate` does."""
        ...


@runtime_checkable
class ConversingAheadEngine(ConversingEngine, Protocol):
    """One that does so while the trainer computes, which `rollout.ahead: 1` needs where an environment plays
    episodes."""

    def open_stream(self, driver: TurnDriver, params: SamplingParams) -> RequestStream:
        """Begin to answer what is asked over the stream, and return at once; not a collective."""
        ...

    def finish_stream(
        self, driver: TurnDriver, stream: RequestStream, params: SamplingParams, *, weights_changed: bool = False
    ) -> None:
        """Answer until nothing is asked any more, as `ConversingEngine.converse`; every rank calls it.
        `weights_changed` as in `AheadEngine.collect`."""
        ...


@runtime_checkable
class CachingEngine(Protocol):
    """An engine that keeps keys and values of prompts for those that begin alike."""

    cache_use: Mapping[int, CacheUse]
    """By server, for what this rank has asked over the run; of the same servers on every rank."""


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can give its memory away between rollouts."""

    def sleep(self) -> None:
        """Give the device's memory to the trainer until the next update; the weights may be lost."""
        ...


@runtime_checkable
class ServedEngine(SleepingEngine, Protocol):
    """An engine in processes of its own, which can fail, and must show that it holds what it was sent: after every
    update it answers a probe."""

    restarts: int
    """Servers that were started again, over the run."""

    def sync_phases(self) -> dict[str, float]:
        """Seconds of the last weight update on this rank, by phase."""
        ...

    def probe(self, request: GenerateRequest, params: SamplingParams) -> dict[int, Completion]:
        """The answers of the servers that this rank looks after, by number; every rank calls it."""
        ...

    def judge(self, gaps: Mapping[int, float], tolerance_nats: float) -> float:
        """The largest gap over all ranks' servers; every rank calls it. Raises where one exceeds the tolerance."""
        ...
