#!/usr/bin/env python3
"""Measure the CPU time of a step per sample, without generation and models.

Usage: python -m benchmarks.overhead CONFIG [key=value ...] [--samples 64 256 1024 4096] [--repeat 5] [--json FILE]

The program runs whole steps of the trainer in one process. Engine and models return immediately. Steps include
prompts, requests, responses as tensors and texts, rewards, sending of samples, plans of microbatches, advantages,
whitening, reports, samples.jsonl and metrics. Steps do not include computations of models, generation and copies of
weights; `benchmarks/step.py` measures these parts. The program prints CPU milliseconds of this process per sample,
without reward workers, and the seconds of each stage. The step has the configuration's number of updates, on one
rank.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.control_plane import Echo, Size, placement
from benchmarks.report import of_config, parser_of, print_table, refuse, write_json
from benchmarks.step import configuration, next_step
from megappo.config import Config, ConfigError, derive_run
from megappo.config.role_models import load_tokenizer
from megappo.data import read_prompts, training_cursor
from megappo.engines.base import BatchEngine
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams, SyncReport
from megappo.engines.requests import RequestTracker
from megappo.plan.planner import read_models
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.trainer import Trainer
from megappo.rewards.scorer import RewardScorer
from megappo.runtime.process import Runtime, start_runtime
from megappo.runtime.watch.interrupts import NeverStop

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """Measurements of steps with one number of samples."""

    samples: int
    cpu_seconds: list[float]
    """CPU seconds of whole steps."""
    seconds: list[float]
    """Seconds of whole steps, including waits."""
    cpu_seconds_per_sample: float
    """Median CPU seconds per sample."""
    stages: dict[str, float]
    """Median seconds of each stage, including waits."""


class EchoEngine(BatchEngine):
    """Engine that returns prepared responses."""

    def __init__(self, response_tokens: int, vocabulary: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(5)
        self._tokens = torch.randint(vocabulary, (2 * response_tokens,), generator=g).tolist()
        self._length = response_tokens

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        """Yield responses of different lengths. The mean length is half of the longest length."""
        lengths = (1 + request.seed % self._length for request in requests)
        answers = (Completion(tuple(self._tokens[n : 2 * n]), (0.0,) * n, False, self.version) for n in lengths)
        yield from enumerate(answers)

    def update_weights(self, _named_tensors: Any, version: int) -> SyncReport:
        """Set the version without receiving weights."""
        self.version = version
        return SyncReport(())


class _NoWeights:
    total_bytes = 0


def make_trainer(config: Config, runtime: Runtime, tokens: int) -> Trainer:
    """Build the trainer of a run whose engine and models return immediately."""
    models = read_models(config, ROOT / "configs" / "models").models
    samples = config.rollout.batch_sequences
    size = Size(1, samples, tokens)
    actor = Echo(placement("actor", config, size), models.actor, runtime)
    critic = Echo(placement("critic", config, size), models.critic, runtime) if config.critic is not None else None
    tokenizer = load_tokenizer(config)
    prompts = read_prompts(config.data, tokenizer)
    engine = EchoEngine(config.rollout.max_response_tokens, models.actor.vocab_size)
    components: dict[str, Any] = dict.fromkeys(RunComponents.__dataclass_fields__)
    components |= {
        "config": config,
        "derived": derive_run(config, 1),
        "runtime": runtime,
        "tokenizer": tokenizer,
        "stop_token_ids": (),
        "train_prompts": prompts,
        "cursor": training_cursor(prompts, config.data, config.run.seed),
        "reward": RewardScorer(config.reward, runtime.device),
        "engine": engine,
        "requests": RequestTracker(engine),
        "actor": actor,
        "critic": critic,
        "reference": actor if config.reference is not None else None,
        "weights": _NoWeights(),
        "stop": NeverStop(),
        "origins": (),
    }
    trainer = Trainer(RunComponents(**components), Reporter(config, components["derived"], runtime))
    trainer.step = config.critic.warmup_steps if config.critic is not None else 0
    trainer.sync_weights()
    return trainer


@contextmanager
def undisturbed() -> Iterator[None]:
    """Freeze the garbage collector, so that scans of imported objects do not count as cost of samples."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure(config: Config, runtime: Runtime, tokens: int, repeat: int) -> Row:
    """Measure steps with one number of samples. The first step is not counted."""
    trainer = make_trainer(config, runtime, tokens)
    cpu, wall, stages = [], [], list[dict[str, float]]()
    try:
        next_step(trainer)
        with undisturbed():
            for _ in range(repeat):
                cpu_start, start = time.process_time(), time.perf_counter()
                metrics = next_step(trainer)
                trainer.reporter.log(trainer.step, metrics)
                cpu.append(time.process_time() - cpu_start)
                wall.append(time.perf_counter() - start)
                stages.append({n.removeprefix("time/"): x for n, x in metrics.items() if n.startswith("time/")})
    finally:
        trainer.reporter.close()
        if trainer.parts.reward is not None:
            trainer.parts.reward.close()
    medians = {name: statistics.median(step[name] for step in stages) for name in stages[0]}
    samples = config.rollout.batch_sequences
    return Row(samples, cpu, wall, statistics.median(cpu) / samples, medians)


def sized(config: Config, samples: int) -> list[str]:
    """Return overrides for a step with `samples` samples and an unchanged number of updates."""
    per_prompt = config.rollout.samples_per_prompt
    size = config.rollout.batch_sequences
    minibatches = {name: max(1, samples * r.minibatch_sizes(size)[0] // size) for name, r in config.trained.items()}
    return [
        f"rollout.prompts_per_step={samples // per_prompt}",
        *(f"{name}.minibatch_sequences={n}" for name, n in minibatches.items()),
        *(f"{name}.layout={{}}" for name in config.trained),
        "algorithm.mismatch_stop_nats=1e9",
        "algorithm.mismatch_warn_nats=1e9",
    ]


def measure_all(path: str, overrides: Sequence[str], arguments: argparse.Namespace) -> list[Row]:
    """Return a row for each number of samples. Raises ConfigError."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        base = configuration(path, overrides, directory)
        with start_runtime(base.runtime) as runtime:
            for samples in arguments.samples:
                own = [*overrides, *sized(base, samples), "logging.tensorboard=true"]
                config = configuration(path, own, f"{directory}/{samples}")
                rows.append(measure(config, runtime, base.max_sequence_tokens, arguments.repeat))
    return rows


def print_rows(rows: Sequence[Row], title: str) -> None:
    """Print the rows as a table."""
    cells, stages = [], [name for name in rows[0].stages if name != "step"]
    for r in rows:
        cpu = (statistics.median(r.cpu_seconds), min(r.cpu_seconds), max(r.cpu_seconds), 1e3 * r.cpu_seconds_per_sample)
        cells.append((str(r.samples), *(f"{x:.3f}" for x in (*cpu, *(r.stages[name] for name in stages)))))
    columns = ("samples", "CPU s", "min", "max", "CPU ms a sample", *stages)
    print_table(title, columns, cells, texts=0, width=120)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 256, 1024, 4096], help="samples per step")
    parser.add_argument("--repeat", type=int, default=5, help="steps that are counted")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    try:
        rows = measure_all(arguments.config, arguments.overrides, arguments)
    except ConfigError as error:
        return refuse("overhead", error)
    print_rows(rows, f"{Path(arguments.config).stem}: a step whose engine and models answer at once")
    write_json(arguments, of_config("overhead", arguments) | {"rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
