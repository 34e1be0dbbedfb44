#!/usr/bin/env python3
"""Compare PPO steps of megappo and TRL: samples per second, peak memory, and learning curves.

Usage: python -m benchmarks.trl [CONFIG [key=value ...]] [--ranks 1] [--threads 2] [--precision mixed]
           [--lengths full:64 even:1-64 tail:32-256] [--trl-microbatch N] [--warmup 1] [--repeat 5] [--json FILE]
       python -m benchmarks.trl [CONFIG [key=value ...]] --curves [--seeds 1 2 3] [--steps 20] [--json FILE]
       python -m benchmarks.trl --join FILE [FILE ...] [--json FILE]

Both sides make the same PPO step of the configuration on the same prompts. megappo uses `--ranks` processes, and
TRL's `experimental.ppo.PPOTrainer` uses one process. Both sides have the same total number of threads. The sides
alternate step by step, and each speedup compares the two sides of one round. Peak memory is the peak of the counted
steps. Response lengths are a seeded list for both sides: the end token is forbidden before the length, and forced at
the length.

`--precision`: with `mixed`, megappo trains in bfloat16 with float32 main weights, and TRL has float32 parameters
under bfloat16 autocast. `bfloat16` and `float32` are the dtype of all tensors in TRL. `--curves` compares learning
with natural lengths. `--join` combines the results of several runs. `--trl-microbatch`: sequences per microbatch of
TRL, if a whole minibatch does not fit in memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lengths import Profile
from benchmarks.report import of_config, parser_of, print_table, refuse, write_json
from benchmarks.sides import Side, Turn, started
from benchmarks.trl_sides import Run, check, megappo_side, trl_side
from megappo.config import Config

LAST = 5
"""Number of last steps of a curve for the compared mean."""
COMPARABLE = (
    "actor.layout.pipeline_parallel=1", "critic.layout.pipeline_parallel=1", "actor.epochs=2", "critic.epochs=2",
    "actor.minibatch_sequences=16", "critic.minibatch_sequences=16", "actor.microbatch_budget_tokens=2048",
    "critic.microbatch_budget_tokens=2048", "actor.optimizer={learning_rate: 3.0e-5, clip_grad_norm: 0}",
    "critic.optimizer={learning_rate: 3.0e-5, clip_grad_norm: 0}", "reference={}", "rollout.prompts_per_step=32",
    "rollout.generate_batch_sequences=32", "algorithm.lam=0.95", "algorithm.dual_clip=null",
    "algorithm.kl_in_reward={kind: kl, coef: 0.05}", "algorithm.mismatch_warn_nats=1e9",
    "algorithm.mismatch_stop_nats=1e9",
)  # fmt: skip
"""Overrides that make a configuration equal to TRL's defaults. Log-probabilities of the engine are those of the
forced tokens."""
MISSING = (
    "trl.py: error: TRL is not installed; add it to this environment with "
    "`pip install --no-deps trl==1.12.0` and `pip install accelerate datasets pandas`"
)


@dataclass(frozen=True)
class Row:
    """Measurements of both sides with one profile of lengths."""

    profile: str
    precision: str
    ranks: int
    """Processes of megappo."""
    samples: int
    """Samples of a step."""
    trl: list[Turn]
    megappo: list[Turn]
    speeds: list[float]
    """Seconds of TRL divided by seconds of megappo in the same round."""
    median_speed: float
    trl_samples_per_second: float
    megappo_samples_per_second: float
    trl_peak_bytes: int
    megappo_peak_bytes: int

    @classmethod
    def of(cls, profile: str, precision: str, ranks: int, samples: int, turns: Mapping[str, list[Turn]]) -> Row:
        """Build a row from the turns of both sides."""
        trl, megappo = turns["trl"], turns["megappo"]
        speeds = [t.seconds / m.seconds for t, m in zip(trl, megappo, strict=True)]
        rates = [samples / statistics.median(turn.seconds for turn in side) for side in (trl, megappo)]
        peaks = [max(turn.peak_bytes for turn in side) for side in (trl, megappo)]
        shown = (profile, precision, ranks, samples)
        return cls(*shown, trl, megappo, speeds, statistics.median(speeds), rates[0], rates[1], peaks[0], peaks[1])


@dataclass(frozen=True)
class Curve:
    """Mean rewards of the steps of one seed."""

    seed: int
    trl: list[float]
    megappo: list[float]
    trl_response_tokens: list[float]
    megappo_response_tokens: list[float]


@contextmanager
def both_sides(run: Run, ranks: int) -> Iterator[dict[str, Side]]:
    """Start TRL and megappo, and yield both sides when they are ready."""
    threads = max(1, run.threads // ranks)
    own = replace(run, overrides=(*run.overrides, f"runtime.threads_per_rank={threads}"))
    with ExitStack() as stack:
        sides = {}
        for name, work, settings, count in (("trl", trl_side, run, 1), ("megappo", megappo_side, own, ranks)):
            place = replace(settings, directory=f"{run.directory}/{name}")
            log = Path(run.directory, f"{name}-{run.profile.shape}-{run.seed}.log")
            sides[name] = stack.enter_context(started(name, work, (place,), count, run.threads // count, log))
        for side in sides.values():
            side.await_ready()
        yield sides


def measure(run: Run, samples: int, arguments: argparse.Namespace) -> Row:
    """Measure one profile of lengths. The sides alternate in each round."""
    turns: dict[str, list[Turn]] = {"trl": [], "megappo": []}
    with both_sides(run, arguments.ranks) as sides:
        for _ in range(arguments.warmup + arguments.repeat):
            for name, side in sides.items():
                turns[name].append(side.turn())
    counted = {name: of_side[arguments.warmup :] for name, of_side in turns.items()}
    return Row.of(str(run.profile), run.precision, arguments.ranks, samples, counted)


def learn(run: Run, arguments: argparse.Namespace) -> Curve:
    """Train both sides with one seed. The sides run concurrently, because no time is measured."""
    turns: dict[str, list[Turn]] = {"trl": [], "megappo": []}
    with both_sides(run, arguments.ranks) as sides:
        for step in range(1, arguments.steps + 1):
            for side in sides.values():
                side.request()
            for name, side in sides.items():
                turns[name].append(side.answer())
            rewards_shown = (f"{name} {of_side[-1].metrics['reward']:.3f}" for name, of_side in turns.items())
            print(f"seed {run.seed}, step {step}: reward {', '.join(rewards_shown)}", flush=True)
    rewards, tokens = (
        [[turn.metrics[name] for turn in side] for side in turns.values()] for name in ("reward", "response_tokens")
    )
    return Curve(run.seed, *rewards, *tokens)


@dataclass(frozen=True)
class Comparison:
    """Mean rewards of the last steps over seeds, and their difference with its standard error."""

    trl_mean: float
    megappo_mean: float
    difference: float
    standard_error: float
    """Standard error of the difference. nan for one seed."""

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> Comparison:
        """Compare the last steps of curves."""
        of_sides = ([c.trl for c in curves], [c.megappo for c in curves])
        ends = [[statistics.mean(rewards[-LAST:]) for rewards in side] for side in of_sides]
        trl, megappo = (statistics.mean(end) for end in ends)
        enough = len(curves) > 1
        error = math.sqrt(sum(statistics.variance(end) / len(end) for end in ends)) if enough else math.nan
        return cls(trl, megappo, megappo - trl, error)

    @property
    def sentence(self) -> str:
        """The comparison as a sentence."""
        errors = f"{abs(self.difference) / self.standard_error:.1f}" if self.standard_error > 0 else "no number of"
        return (
            f"mean reward of the last {LAST} steps: TRL {self.trl_mean:.3f}, megappo {self.megappo_mean:.3f}, "
            f"{errors} standard errors apart ({self.standard_error:.3f})"
        )


def print_rows(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    cells = []
    for r in rows:
        rates = (r.trl_samples_per_second, r.megappo_samples_per_second, r.median_speed, min(r.speeds), max(r.speeds))
        peaks = (f"{peak / 1e9:.1f}" for peak in (r.trl_peak_bytes, r.megappo_peak_bytes))
        cells.append((r.profile, r.precision, str(r.ranks), *(f"{rate:.2f}" for rate in rates), *peaks))
    title = f"samples per second, medians of {max(len(row.speeds) for row in rows)} rounds in turns"
    columns = ("responses", "TRL in", "ranks", "TRL", "megappo", "times TRL", "from", "to", "TRL GB", "megappo GB")
    print_table(title, columns, cells, texts=2, width=110)


def read_rows(written: Sequence[dict[str, Any]]) -> list[Row]:
    """Parse rows that `--json` wrote. Rows with the same settings are combined to one row with all rounds."""
    by_kind: dict[tuple[str, str, int, int], dict[str, list[Turn]]] = {}
    for row in written:
        kind = (row["profile"], row["precision"], row["ranks"], row["samples"])
        turns = by_kind.setdefault(kind, {"trl": [], "megappo": []})
        for side, of_side in turns.items():
            of_side += [Turn(**turn) for turn in row[side]]
    return [Row.of(*kind, turns) for kind, turns in by_kind.items()]


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__, has_config=False)
    parser.add_argument("config", nargs="?", default="configs/smollm2_arithmetic.yaml", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--ranks", type=int, default=1, help="processes of megappo")
    parser.add_argument("--threads", type=int, default=cores, help="total threads of each side")
    parser.add_argument("--precision", choices=["mixed", "bfloat16", "float32"], default="mixed", help="TRL's")
    parser.add_argument("--trl-microbatch", type=int, metavar="N", help="sequences; default: a minibatch")
    lengths = ["full:64", "even:1-64", "tail:32-256"]
    parser.add_argument("--lengths", nargs="+", default=lengths, metavar="PROFILE", help="lengths of responses")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--repeat", type=int, default=5, help="rounds that are counted")
    parser.add_argument("--curves", action="store_true", help="compare what both learn, with natural lengths")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20, help="steps per curve")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="combine the results of earlier runs")
    return parser.parse_intermixed_args()


def plan_run(arguments: argparse.Namespace, directory: str) -> tuple[Run, Config]:
    """Return the settings of both sides. Raises ValueError, or its subclass ConfigError, for settings that cannot be
    compared."""
    if arguments.threads % arguments.ranks:
        raise ValueError(f"--threads {arguments.threads} is not a multiple of --ranks {arguments.ranks}; change one")
    dtype = "float32" if arguments.precision == "float32" else "bfloat16"
    overrides = (*COMPARABLE, f"model.dtype={dtype}", *arguments.overrides)
    profile = Profile.read("natural:1")
    run = Run(arguments.config, overrides, directory, profile, arguments.precision, arguments.threads, seed=1)
    config = run.read()
    check(config)
    minibatch = config.actor.minibatch_sizes(config.rollout.batch_sequences)[0]
    microbatch = arguments.trl_microbatch or minibatch
    if minibatch % microbatch:
        raise ValueError(f"--trl-microbatch {microbatch} does not divide the minibatch of {minibatch}; change one")
    return replace(run, trl_microbatch=microbatch), config


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the requested measurements."""
    with tempfile.TemporaryDirectory() as directory:
        run, config = plan_run(arguments, directory)
        results: dict[str, Any] = {"rows": [], "curves": []}
        if arguments.curves:
            run = replace(run, profile=Profile("natural", config.rollout.max_response_tokens))
            results["curves"] = [asdict(learn(replace(run, seed=seed), arguments)) for seed in arguments.seeds]
            return results
        for profile in map(Profile.read, arguments.lengths):
            row = measure(replace(run, profile=profile), config.rollout.batch_sequences, arguments)
            results["rows"].append(asdict(row))
        return results


def main() -> int:
    arguments = parse()
    if arguments.join is not None:
        parts = [json.loads(path.read_text()) for path in arguments.join]
        results = {key: [item for part in parts for item in part[key]] for key in ("rows", "curves")}
        document = parts[0]
    elif importlib.util.find_spec("trl") is None:
        print(MISSING, file=sys.stderr)
        return 2
    else:
        try:
            results = compare(arguments)
        except ValueError as error:
            return refuse("trl", error)
        document = of_config("trl", arguments, "trl") | {"ranks": arguments.ranks, "threads": arguments.threads}
    rows = read_rows(results["rows"])
    document |= {**results, "rows": [asdict(row) for row in rows]}
    if rows:
        print_rows(rows)
    if results["curves"]:
        print(Comparison.of([Curve(**curve) for curve in results["curves"]]).sentence)
    write_json(arguments, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
