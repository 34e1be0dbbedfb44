#!/usr/bin/env python3
"""Measure the time of a step for different numbers of processes.

Usage: python -m benchmarks.scaling CONFIG [key=value ...] [--worlds 1 2 4] [--kinds weak strong] [--axis data]
           [--threads 1] [--warmup 1] [--repeat 3] [--rounds 2] [--json FILE]

The program runs steps of a configuration on one machine, in worlds that alternate. Strong scaling: all worlds
compute the step of the configuration. Weak scaling: prompts and minibatches grow with the world, so the work per
process is constant. `--axis` selects the parallelism of additional processes. `data` keeps the layouts of the
configuration, and uses the remaining processes for data parallelism. `pipeline`, `tensor` and `context` use the
whole world for one replica of actor and critic. Each process has `--threads` threads. Perfect scaling is limited by
the number of cores of the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import of_config, parser_of, print_table, refuse, write_json
from benchmarks.sides import Turn, Turns, started
from benchmarks.step import configuration, next_step, running
from megappo.config import Config, ConfigError, derive_run, load_config

KINDS = ("weak", "strong")
AXES = ("data", "pipeline", "tensor", "context")


@dataclass(frozen=True)
class World:
    """Number of processes and their parallelism."""

    kind: str
    processes: int
    axis: str

    def overrides(self, config: Config) -> Iterator[str]:
        """Yield the overrides of the configuration for this world."""
        times = self.processes if self.kind == "weak" else 1
        yield f"rollout.prompts_per_step={times * config.rollout.prompts_per_step}"
        for name, role in config.trained.items():
            yield f"{name}.minibatch_sequences={times * role.minibatch_sizes(config.rollout.batch_sequences)[0]}"
            if self.axis != "data":
                yield f"{name}.layout.{self.axis}_parallel={self.processes}"


@dataclass(frozen=True)
class Row:
    """Measurements of steps of one world."""

    kind: str
    axis: str
    processes: int
    samples: int
    """Samples of a step."""
    tokens: float
    """Median tokens of a step."""
    seconds: list[float]
    median_seconds: float
    samples_per_second: float
    tokens_per_second: float
    efficiency: float
    """Tokens per second and used core, relative to the smallest world."""
    peak_bytes: int
    """Sum of the peak memory of all processes."""
    stages: dict[str, float]
    """Median seconds of each stage."""


def side(turns: Turns, path: str, overrides: Sequence[str], directory: str) -> None:
    """Run steps on request. This function is the work of each process of a world."""
    with running(configuration(path, overrides, directory)) as trainer:
        turns.ready()
        while True:
            turns.wait()
            metrics = next_step(trainer)
            shown = {name: x for name, x in metrics.items() if name.startswith("time/") or name == "step_tokens"}
            turns.done(shown if trainer.parts.runtime.is_main else {})


def measure(world: World, arguments: argparse.Namespace, directory: str) -> list[Turn]:
    """Return the counted steps of a world in one round."""
    config = load_config(arguments.config, arguments.overrides)
    overrides = [*arguments.overrides, *world.overrides(config), f"runtime.threads_per_rank={arguments.threads}"]
    derive_run(configuration(arguments.config, overrides, directory), world.processes)  # raises errors early
    name = f"{world.kind}-{world.processes}"
    work, log = (arguments.config, overrides, f"{directory}/{name}"), Path(directory, f"{name}.log")
    with started(f"{world.processes} processes", side, work, world.processes, arguments.threads, log) as of_world:
        of_world.await_ready()
        return [of_world.turn() for _ in range(arguments.warmup + arguments.repeat)][arguments.warmup :]


def rows_of(turns: dict[World, list[Turn]], samples: int, cores: int, threads: int) -> list[Row]:
    """Return a row for each world. `samples`: samples of a step of one process."""
    rows: list[Row] = []
    for world, steps in turns.items():
        seconds = [turn.seconds for turn in steps]
        median = statistics.median(seconds)
        in_step = samples * (world.processes if world.kind == "weak" else 1)
        tokens = statistics.median(turn.metrics["step_tokens"] for turn in steps)
        per_core = tokens / median / min(cores, threads * world.processes)
        smallest = next((row for row in rows if row.kind == world.kind), None)
        best = per_core
        if smallest is not None:
            best = smallest.tokens_per_second / min(cores, threads * smallest.processes)
        stages = {
            name.removeprefix("time/"): statistics.median(turn.metrics[name] for turn in steps)
            for name in steps[0].metrics
            if name.startswith("time/")
        }
        rates = (in_step / median, tokens / median, per_core / best)
        peak = max(turn.peak_bytes for turn in steps)
        shown = (world.kind, world.axis, world.processes, in_step, tokens, seconds, median)
        rows.append(Row(*shown, *rates, peak, stages))
    return rows


def print_rows(rows: Sequence[Row], title: str) -> None:
    """Print the rows as a table."""
    columns = (
        "scaling", "processes", "samples", "median s", "min s", "max s", "samples/s", "tokens/s", "of perfect", "GB",
    )  # fmt: skip
    cells = []
    for r in rows:
        seconds = (f"{x:.2f}" for x in (r.median_seconds, min(r.seconds), max(r.seconds)))
        rates = (f"{r.samples_per_second:.2f}", f"{r.tokens_per_second:.0f}", f"{r.efficiency:.0%}")
        cells.append((r.kind, str(r.processes), str(r.samples), *seconds, *rates, f"{r.peak_bytes / 1e9:.1f}"))
    print_table(title, columns, cells, width=110)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="processes")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--axis", choices=AXES, default="data", help="parallelism of additional processes")
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--warmup", type=int, default=1, help="uncounted steps of a world in each round")
    parser.add_argument("--repeat", type=int, default=3, help="counted steps of a world in each round")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds; all worlds run in each round")
    return parser.parse_intermixed_args()


def main() -> int:
    arguments = parse()
    worlds = [World(kind, n, arguments.axis) for kind in arguments.kinds for n in sorted(arguments.worlds)]
    turns: dict[World, list[Turn]] = {world: [] for world in worlds}
    with tempfile.TemporaryDirectory() as directory:
        try:
            for number in range(arguments.rounds):
                for world in worlds:
                    twin = World(worlds[0].kind, world.processes, world.axis)
                    if world.processes == 1 and twin != world:  # one process has the same work in both kinds
                        turns[world] = turns[twin]
                        continue
                    turns[world] += measure(world, arguments, f"{directory}/{number}")
            samples = load_config(arguments.config, arguments.overrides).rollout.batch_sequences
        except ConfigError as error:
            return refuse("scaling", error)
    cores = len(os.sched_getaffinity(0))
    rows = rows_of(turns, samples, cores, arguments.threads)
    size = f"{arguments.threads} thread{'s' * (arguments.threads > 1)} each, {cores} cores"
    print_rows(rows, f"{Path(arguments.config).stem}, {arguments.axis} parallel, {size}")
    results = {"cores": cores, "threads": arguments.threads, "rows": [asdict(row) for row in rows]}
    write_json(arguments, of_config("scaling", arguments) | results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
