"""A scheduler of responses with an engine without a model."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoTokenizer

from megappo.config import load_config
from megappo.config.sections.engine import EngineCapabilities
from megappo.data.curriculum import Curriculum
from megappo.data.cursor import Cursor
from megappo.engines.base import BatchEngine, EngineBase
from megappo.engines.protocol import Completion, GenerateRequest, PauseMode, SamplingParams, SyncReport
from megappo.engines.requests import RequestTracker
from megappo.engines.stretches import continued, stretches_in
from megappo.ppo.rollout.sampling import sample_seed
from megappo.ppo.rollout.scheduler import RolloutScheduler
from megappo.runtime.watch.interrupts import NeverStop
from megappo.types import Prompt, Rollouts
from tests.support.places import BASE, TINY

PROMPTS = [Prompt(i, (2, 3 + i % 10), f"{i}", None, {}) for i in range(30)]
STOP = 1
VOCABULARY = 16
_RUN_SEED = load_config(str(BASE)).run.seed


@functools.cache
def numbers_by_seed(run_seed: int, samples: int = 400, tokens: int = 4) -> dict[int, int]:
    """Return the numbers of the samples in flight by the seeds of their requests, including requests that continue
    after up to `tokens` tokens."""
    numbers = dict[int, int]()
    for number in range(samples):
        request = GenerateRequest((), sample_seed(run_seed, -3, number), 0)
        begun = [Completion((0,) * n, (0.0,) * n, False, 0, broken_off=True) for n in range(1, tokens + 1)]
        numbers |= {continued(request, partial, 9).seed: number for partial in (None, *begun)}
    return numbers


@functools.cache
def _numbers_in_order() -> dict[int, int]:
    """Return the numbers of the samples by the seeds of their requests, for runs in which each step takes the next two
    prompts of two samples, and for runs with prompts in flight."""
    seeds = {sample_seed(_RUN_SEED, step, place): 4 * (step - 1) + place for step in range(1, 9) for place in range(4)}
    return numbers_by_seed(_RUN_SEED) | seeds


@dataclass
class Running:
    """A request with its tokens and the version of each token."""

    request: GenerateRequest
    future: Future[Completion] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class StandIn(EngineBase):
    """An engine that generates tokens on demand. Sample n has 1 + n % 3 tokens that identify the sample, and the stop
    token. The log-probability of a token is minus its weight version."""

    capabilities = EngineCapabilities(concurrent=True)

    def __init__(self, version: int = 1, ticks: int = 1) -> None:
        super().__init__()
        self.version, self.ticks = version, ticks
        """`ticks` is the number of tokens that a poll generates per request."""
        self.running: dict[int, Running] = {}
        self.finishes: list[int] = []
        """Numbers of the finished requests, in order."""
        self.prefixes: dict[int, list[int]] = {}
        """Number of earlier tokens of each request, one entry per submission."""
        self.stuck: frozenset[int] = frozenset()

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        new = {_numbers_in_order()[request.seed]: Running(request) for request in requests}
        assert len(new) == len(requests) and not new.keys() & self.running.keys()
        self.running |= new
        for number, running in new.items():
            self.prefixes.setdefault(number, []).append(len(running.request.token_ids) - 2)
        return [running.future for running in new.values()]

    def tick(self) -> None:
        """Generate one token per request."""
        for number, running in list(self.running.items()):
            if number not in self.stuck:
                previous = len(running.request.token_ids) - 2
                running.tokens.append(3 + number % 10 if previous + len(running.tokens) < 1 + number % 3 else STOP)
                running.versions.append(self.version)
                if running.tokens[-1] == STOP:
                    self.finishes.append(number)
                    self._answer(number, broken_off=False)

    def _answer(self, number: int, *, broken_off: bool) -> None:
        running = self.running.pop(number)
        stretches = stretches_in(running.versions)
        completion = Completion(
            tuple(running.tokens),
            tuple(-float(version) for version in running.versions),
            False,
            min(running.versions, default=self.version),
            broken_off=broken_off,
            stretches=stretches if len(stretches) > 1 else (),
        )
        running.future.set_result(completion)

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        for _ in range(self.ticks):
            self.tick()

    def pause(self, mode: PauseMode) -> None:
        assert mode == "abort"
        for number in [*self.running]:
            self._answer(number, broken_off=True)

    def update_weights(self, named_tensors: Any, version: int) -> SyncReport:
        self.version = version
        return SyncReport(())


class Holding(StandIn):
    """Keeps running requests while weights change."""

    capabilities = EngineCapabilities(concurrent=True, keeps_requests=True)
    hold_calls = 0

    def pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            super().pause(mode)
        else:
            self.tick()  # generate tokens in the meantime
            self.hold_calls += 1


class Constant(BatchEngine):
    """An engine without concurrency that answers all requests with the same token and the stop token."""

    def __init__(self, token: int = 3, version: int = 4) -> None:
        super().__init__()
        self.token, self.version = token, version

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        return enumerate(Completion((self.token, STOP), (-1.0, -1.0), False, self.version) for _ in requests)

    def update_weights(self, named_tensors: Any, version: int) -> SyncReport:
        raise AssertionError("weights stay")


def parts(engine: Any, *overrides: str, steps: int = 8) -> Any:
    """Return the components of a run: two prompts of two samples per step, three steps ahead."""
    all_overrides = ("rollout.ahead=3", "rollout.max_lag=3", "rollout.prompts_per_step=2", *overrides)
    config = load_config(str(BASE), [f"model.path={TINY}", *all_overrides])
    cursor = Cursor(len(PROMPTS), 3, False, fingerprint="data", most_resting=0.9)
    settings = config.data.curriculum
    return SimpleNamespace(
        config=config,
        engine=engine,
        requests=RequestTracker(engine, VOCABULARY),
        episodes=None,
        generation=None,
        cursor=cursor,
        curriculum=None if settings is None else Curriculum(settings, cursor, 0),
        train_prompts=PROMPTS,
        runtime=SimpleNamespace(rank=0, world_size=1, is_main=True, device=torch.device("cpu")),
        stop=NeverStop(),
        tokenizer=AutoTokenizer.from_pretrained(TINY),
        vocabulary=VOCABULARY,
        answerer="the engine",
        derived=SimpleNamespace(steps=steps),
        sampling=lambda most, trained_on: SamplingParams(
            config.rollout.temperature, most, (STOP,), min_new_tokens=config.rollout.min_response_tokens
        ),
    )


def scheduler(engine: Any, *overrides: str, steps: int = 8) -> RolloutScheduler:
    return RolloutScheduler(parts(engine, *overrides, steps=steps))


SYNCHRONOUS = ("rollout.ahead=0", "rollout.max_lag=null")
ONE_AHEAD = ("rollout.ahead=1", "rollout.max_lag=null")


def sync(responses: RolloutScheduler, engine: EngineBase) -> None:
    """Change the weights between two steps."""
    responses.pause()
    engine.version += 1
    responses.go_on()


def trained(rollouts: Rollouts) -> list[int]:
    """Return the prompt index of each sample."""
    return [prompt.index for prompt in rollouts.prompts]
