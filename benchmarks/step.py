#!/usr/bin/env python3
"""Measure the time of a PPO step, stage by stage.

Usage: torchrun --nproc-per-node N -m benchmarks.step CONFIG [key=value ...] [--warmup 2] [--repeat 5] [--json FILE]

The program runs steps of a configuration; warm-up steps are not counted. It prints the median, minimum and maximum
seconds of each stage, and the tokens and samples per second at the median. Evaluation and export are off. The
program uses a temporary run directory.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from benchmarks.report import of_config, parser_of, print_table, refuse, write_json
from megappo.config import Config, ConfigError, derive_run, load_config
from megappo.preflight.resolved import resolve_for_device

if TYPE_CHECKING:
    from megappo.ppo.trainer import Trainer


@dataclass(frozen=True)
class StageTiming:
    """Seconds of a stage over the counted steps. Rates are tokens and samples of the whole step per median second of
    the stage."""

    stage: str
    median_seconds: float
    min_seconds: float
    max_seconds: float
    tokens_per_second: float
    samples_per_second: float


QUIET = ("evaluation=null", "data.validation=null", "logging.console=quiet", "logging.tensorboard=false")
"""Overrides of a measured run. They disable everything except the steps."""


def configuration(path: str, overrides: Sequence[str], directory: str) -> Config:
    """Load a configuration for a measurement with the given run directory. Raises ConfigError."""
    place = [f"run.directory={directory}", "run.export_final_model=false"]
    return resolve_for_device(load_config(path, [*QUIET, *overrides, *place]))


@contextmanager
def running(config: Config) -> Iterator[Trainer]:
    """Yield the trainer of a run on this rank. The engine has the weights of the actor."""
    from megappo.ppo.assembly.components import assemble
    from megappo.ppo.reports.reporting import Reporter
    from megappo.ppo.trainer import Trainer
    from megappo.runtime.process import start_runtime

    derived = derive_run(config, int(os.environ.get("WORLD_SIZE", "1")))
    with start_runtime(config.runtime) as runtime, closing(Reporter(config, derived, runtime)) as reporter:
        parts = assemble(config, derived, runtime)
        try:
            trainer = Trainer(parts, reporter)
            trainer.sync_weights()
            yield trainer
        finally:
            parts.close()


def next_step(trainer: Trainer) -> dict[str, float]:
    """Make one more step and return its metrics. On the main rank, these are the metrics of all ranks."""
    trainer.step += 1
    trainer.ppo_step()
    return dict(trainer.metrics)


def run_steps(config: Config, warmup: int, repeat: int) -> list[dict[str, float]] | None:
    """Return the metrics of the counted steps on the main rank, None on other ranks."""
    with running(config) as trainer:
        steps = [next_step(trainer) for _ in range(warmup + repeat)]
        return steps[warmup:] if trainer.parts.runtime.is_main else None


def summarise(steps: list[dict[str, float]]) -> list[StageTiming]:
    """Return one row per stage. The last row is the whole step."""
    tokens = statistics.median(step["step_tokens"] for step in steps)
    samples = statistics.median(step["step_samples"] for step in steps)
    names = dict.fromkeys(name for step in steps for name in step if name.startswith("time/"))
    rows = []
    for name in names:
        seconds = [step[name] for step in steps if name in step]
        median = statistics.median(seconds)
        rows.append(
            StageTiming(
                name.removeprefix("time/"), median, min(seconds), max(seconds), tokens / median, samples / median
            )
        )
    return rows


def outside_share(steps: list[dict[str, float]]) -> float:
    """Return the median share of a step outside generation and the stages of the models. This share includes
    rewards, advantages, the weight sync, logging and time outside all stages."""
    within = ("time/rollout", "time/forward", "time/update_critic", "time/update_actor")
    return statistics.median(1 - sum(step.get(name, 0.0) for name in within) / step["time/step"] for step in steps)


def print_rows(rows: list[StageTiming], title: str) -> None:
    """Print the rows as a table."""
    cells = []
    for r in rows:
        seconds = (f"{x:.3f}" for x in (r.median_seconds, r.min_seconds, r.max_seconds))
        cells.append((r.stage, *seconds, f"{r.tokens_per_second:.0f}", f"{r.samples_per_second:.1f}"))
    print_table(title, ("stage", "median s", "min s", "max s", "tokens/s", "samples/s"), cells)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--repeat", type=int, default=5, help="steps that are counted")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as directory:
        try:
            config = configuration(arguments.config, arguments.overrides, directory)
            steps = run_steps(config, arguments.warmup, arguments.repeat)
        except ConfigError as error:
            return refuse("step", error)
    if steps is None:
        return 0
    rows = summarise(steps)
    print_rows(rows, f"{config.run.name}: {arguments.repeat} steps after {arguments.warmup} of warm-up")
    share = outside_share(steps)
    print(f"outside of generation and models: {share:.1%} of a step")
    report = {"ranks": int(os.environ.get("WORLD_SIZE", "1")), "outside_share": share}
    write_json(arguments, of_config("step", arguments) | report | {"stages": [asdict(r) for r in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
