#!/usr/bin/env python3
"""Compare the time of a step with the prediction of `megappo plan`.

Usage: python -m benchmarks.planned CONFIG [key=value ...] [--machine here] [--ranks 2] [--sizes 16:32 32:64 32:128]
           [--threads N] [--warmup 1] [--repeat 3] [--json FILE]

The program runs steps of a configuration at several sizes (samples per step and tokens per response). It compares
the seconds of each stage with the plan of the same settings. A plan assumes that every sample has the maximum
length, so responses are forced to full length, and the prompt length is the longest length in the data. `here` is
the CPU of this machine, measured at the start.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lengths import Profile
from benchmarks.report import of_config, parser_of, print_table, refuse, write_json
from benchmarks.sides import Turn, started
from benchmarks.trl_sides import Run, megappo_side
from megappo.config import Config
from megappo.plan.hardware.machine_file import find_machine
from megappo.plan.hardware.machines import Machine
from megappo.plan.planner import make_plan, read_models


@dataclass(frozen=True)
class Row:
    """Planned and measured seconds of one size."""

    caption: str
    machine: str
    planned: dict[str, float]
    """Seconds of each stage, and of the `step`."""
    measured: dict[str, float]
    """Median seconds of each stage."""
    spread: dict[str, tuple[float, float]]
    """Minimum and maximum measured seconds."""


@dataclass(frozen=True)
class Size:
    """Size of a step."""

    samples: int
    response_tokens: int

    @classmethod
    def read(cls, text: str) -> Size:
        """Parse `32:64`. Raises ValueError for other texts."""
        samples, _, tokens = text.partition(":")
        if not (samples.isdecimal() and tokens.isdecimal() and int(samples) * int(tokens) > 0):
            raise ValueError(f"'{text}' is no size; give samples and response tokens such as 32:64")
        return cls(int(samples), int(tokens))

    def overrides(self, config: Config, prompt_tokens: int) -> list[str]:
        """Return overrides for a step of this size with an unchanged number of updates."""
        per_prompt, before = config.rollout.samples_per_prompt, config.rollout.batch_sequences
        return [
            f"rollout.prompts_per_step={max(1, self.samples // per_prompt)}",
            f"data.max_prompt_tokens={prompt_tokens}",
            *(
                f"{name}.minibatch_sequences={max(1, self.samples * role.minibatch_sizes(before)[0] // before)}"
                for name, role in config.trained.items()
            ),
            "algorithm.mismatch_stop_nats=1e9",
            "algorithm.mismatch_warn_nats=1e9",
        ]


def _record(row: Row) -> dict[str, Any]:
    """Return a row in the form of the results, in which the caption has the key `words`."""
    record = asdict(row)
    return {"words": record.pop("caption"), **record}


def measure(run: Run, ranks: int, warmup: int, repeat: int) -> list[Turn]:
    """Return the counted steps of one size."""
    log = Path(run.directory, "log")
    with started("megappo", megappo_side, (run,), ranks, max(1, run.threads // ranks), log) as side:
        side.await_ready()
        return [side.turn() for _ in range(warmup + repeat)][warmup:]


def compare(config: Config, run: Run, size: Size, machine: Machine, arguments: argparse.Namespace) -> Row:
    """Plan and measure one size. Raises ConfigError for impossible settings."""
    models = read_models(config, Path(run.path).parent / "models").models
    plan = make_plan(config, models, machine, arguments.ranks)
    turns = measure(run, arguments.ranks, arguments.warmup, arguments.repeat)
    planned = {stage.name: stage.seconds for stage in plan.stages} | {"step": plan.step_seconds}
    seconds = {name: [turn.metrics[f"time/{name}"] for turn in turns] for name in planned}
    size_text = f"{size.samples} x ({config.data.max_prompt_tokens} + {size.response_tokens}) tokens"
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return Row(size_text, machine.summary, planned, medians, {name: (min(x), max(x)) for name, x in seconds.items()})


def print_rows(rows: Sequence[Row], title: str) -> None:
    """Print the rows as a table."""
    cells = []
    for row in rows:
        for stage, planned in row.planned.items():
            measured = row.measured[stage]
            numbers = (f"{x:.3f}" for x in (planned, measured, *row.spread[stage]))
            cells.append((row.caption if stage == "rollout" else "", stage, *numbers, f"{planned / measured:.2f}"))
    columns = ("a step of", "stage", "planned s", "measured s", "min", "max", "planned/measured")
    print_table(title, columns, cells, texts=2, width=110)


def longest_prompt(config: Config) -> int:
    """Return the number of tokens of the longest prompt in the data."""
    from megappo.preflight.inputs import read_inputs

    prompts = read_inputs(config, validation=False).training
    return max(len(prompts[i].token_ids) for i in range(len(prompts)))


def compare_all(arguments: argparse.Namespace) -> list[Row]:
    """Compare every size. Raises ValueError or its subclass ConfigError."""
    sizes = [Size.read(text) for text in arguments.sizes]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        threads = max(1, arguments.threads // arguments.ranks)
        overrides = (*arguments.overrides, f"runtime.threads_per_rank={threads}")
        first = Run(arguments.config, overrides, directory, Profile("full", 1), "", arguments.threads, seed=1)
        before = first.read()
        prompt_tokens = longest_prompt(before)
        machine = find_machine(arguments.machine)
        for number, size in enumerate(sizes):
            own = (*overrides, *size.overrides(before, prompt_tokens))
            place, profile = f"{directory}/{number}", Profile("full", size.response_tokens)
            run = Run(arguments.config, own, place, profile, "", arguments.threads, seed=1)
            rows.append(compare(run.read(), run, size, machine, arguments))
    return rows


def main() -> int:
    parser = parser_of(__doc__)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--machine", default="here", help="machine, as in `megappo plan`")
    parser.add_argument("--ranks", type=int, default=cores, help="processes")
    parser.add_argument("--threads", type=int, default=cores, help="threads of all processes together")
    parser.add_argument("--sizes", nargs="+", default=["16:32", "32:64", "32:128"], metavar="SAMPLES:TOKENS")
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not counted")
    parser.add_argument("--repeat", type=int, default=3, help="steps that are counted")
    arguments = parser.parse_intermixed_args()
    try:
        rows = compare_all(arguments)
    except ValueError as error:
        return refuse("planned", error)
    print_rows(rows, f"{Path(arguments.config).stem} on {rows[0].machine}, {arguments.ranks} ranks")
    results = {"ranks": arguments.ranks, "threads": arguments.threads, "rows": [_record(row) for row in rows]}
    write_json(arguments, of_config("planned", arguments) | results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
