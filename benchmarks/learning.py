#!/usr/bin/env python3
"""Compare learning with PPO-clip, SAO's loss, and GRPO without a critic, from new and older samples.

Usage: python -m benchmarks.learning [CONFIG ...] --out FOLDER [--methods clip dis grpo] [--lags 0 1] [--seeds 1 2 3]
           [--override key=value ...]

The program runs `megappo train` on one process for every configuration, method, lag and seed, one run after another.
The default configurations are those of SAO for two cores. `clip` and `dis` use the configuration's critic, and
differ only in `algorithm.policy_loss`. `grpo` uses groups of eight samples instead of a critic, with the same number
of samples per step. A lag of 1 uses an engine of the tests that responds with the weights of the previous step.
`--out` contains the metrics of each run. Runs with existing metrics are skipped, so the program can be stopped and
restarted. At the end the program writes `learning.json` and `learning.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import versions
from megappo.config import ConfigError, load_config
from megappo.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = [f"configs/recipes/{name}.yaml" for name in ("sao_two_cores", "sao_tool_two_cores")]
GROUP = 8
"""Samples per prompt with `grpo`."""
METHODS = ("clip", "dis", "grpo")
LAGGED = ("rollout.engine=tests.support.ticking:TickingEngine", "rollout.ahead=1")
QUIET = ("evaluation=null", "logging.tensorboard=false", "runtime.threads_per_rank=1", "actor.layout={}")
GOAL = 0.9
"""Target of the mean reward."""
WINDOW = 5
"""Number of steps for mean rewards."""


@dataclass(frozen=True)
class Arm:
    """Settings of one run."""

    config: str
    method: str
    lag: int
    seed: int
    settings: tuple[str, ...] = ()
    """Overrides of all runs."""

    @property
    def name(self) -> str:
        """Name of the run's file, without its suffix."""
        return f"{Path(self.config).stem}-{self.method}-lag{self.lag}-seed{self.seed}"

    def overrides(self) -> list[str]:
        """Return the overrides of the configuration. Raises ConfigError, or ValueError if groups do not divide the
        step."""
        base = [*QUIET, *self.settings, f"run.seed={self.seed}", *(LAGGED if self.lag else ())]
        if self.method != "grpo":
            return [*base, "critic.layout={}", f"algorithm.policy_loss={self.method}"]
        samples = load_config(self.config, list(self.settings)).rollout.batch_sequences
        if samples % GROUP:
            raise ValueError(f"{self.config} has {samples} samples a step, no multiple of {GROUP}; omit grpo")
        base += [f"rollout.samples_per_prompt={GROUP}", f"rollout.prompts_per_step={samples // GROUP}"]
        return [*base, "critic=null", "algorithm.estimator=grpo", "algorithm.lam=1", "algorithm.policy_loss=clip"]


@dataclass(frozen=True)
class Learned:
    """Learning curve of a run, step by step."""

    task: str
    method: str
    lag: int
    seed: int
    rewards: list[float]
    explained: list[float]
    """Explained variance of the critic. Empty without a critic."""
    left_out: list[float]
    """Share of the tokens with a ratio outside the band of `dis`, or with a clipped loss. Only steps that update the
    actor have a value."""
    seconds: float
    """Seconds of all steps."""

    @classmethod
    def of(cls, arm: Arm, lines: Sequence[dict[str, Any]]) -> Learned:
        """Build the curve from the metrics of a run."""
        steps = [line for line in lines if "reward/mean" in line]
        explained = [line["critic/explained_variance"] for line in steps if "critic/explained_variance" in line]
        names = ("actor/masked_below", "actor/masked_above") if arm.method == "dis" else ("actor/clipfrac",)
        left_out = [sum(line[name] for name in names) for line in steps if "actor/updates" in line]
        rewards, seconds = [line["reward/mean"] for line in steps], sum(line["time/step"] for line in steps)
        return cls(Path(arm.config).stem, arm.method, arm.lag, arm.seed, rewards, explained, left_out, seconds)

    def reward(self, step: int) -> float:
        """Return the mean reward of the last WINDOW steps before and including `step`."""
        return statistics.mean(self.rewards[max(0, step - WINDOW) : step])

    @property
    def steps_to_goal(self) -> float:
        """First step with a mean reward of at least GOAL, or infinity."""
        reached = (n for n in range(WINDOW, len(self.rewards) + 1) if self.reward(n) >= GOAL)
        return next(reached, math.inf)


def train(arm: Arm, out: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run. The run is started if the metrics do not exist. Raises RuntimeError if the run
    fails."""
    file = out / f"{arm.name}.jsonl"
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "megappo", "train", arm.config, f"run.directory={folder}/run"]
            begun = time.perf_counter()
            command += arm.overrides()
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{arm.name} failed: {(done.stdout + done.stderr)[-3000:]}")
            shutil.copy(f"{folder}/run/metrics.jsonl", file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
        print(f"{arm.name}: {time.perf_counter() - begun:.0f} s", flush=True)
    return read_metrics(file)


def marks(steps: int) -> list[int]:
    """Return the steps for the table of rewards: each quarter of all steps."""
    return sorted({max(1, steps * n // 4) for n in range(1, 5)})


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the mean of seeds with minimum and maximum."""
    shown = [f"{x:.{digits}f}" for x in (statistics.mean(values), min(values), max(values))]
    return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]} to {shown[2]})"


def _goal(runs: Sequence[Learned]) -> str:
    reached = sorted(run.steps_to_goal for run in runs if math.isfinite(run.steps_to_goal))
    steps = ", ".join(f"{step:.0f}" for step in reached)
    missed = len(runs) - len(reached)
    return (f"{steps}, " if steps else "") + f"not in {missed} of {len(runs)}" if missed else steps


def _groups(runs: Sequence[Learned]) -> list[list[Learned]]:
    by_group: dict[tuple[str, int], list[Learned]] = {}
    for run in runs:
        by_group.setdefault((run.method, run.lag), []).append(run)
    return [by_group[key] for key in sorted(by_group, key=lambda key: (key[1], METHODS.index(key[0])))]


def tables(runs: Sequence[Learned]) -> Iterator[str]:
    """Yield the lines of a Markdown section for each task."""
    for task in dict.fromkeys(run.task for run in runs):
        of_task = [run for run in runs if run.task == task]
        steps = marks(min(len(run.rewards) for run in of_task))
        head = ["", "lag", *(f"{n} steps" for n in steps), f"steps to {GOAL:g}", "explained variance at the end"]
        head += ["left out or clipped, mean", "most in a step"]
        yield from (f"## {task}", "", f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |")
        for group in _groups(of_task):
            cells = [group[0].method, str(group[0].lag), *(spread([r.reward(n) for r in group]) for n in steps)]
            ends = [statistics.mean(run.explained[-WINDOW:]) for run in group if run.explained]
            cells += [_goal(group), spread(ends) if ends else ""]
            cells += [f"{statistics.mean(statistics.mean(run.left_out) for run in group):.2%}"]
            cells += [f"{max(max(run.left_out) for run in group):.1%}"]
            yield f"| {' | '.join(cells)} |"
        yield ""


def page(document: dict[str, Any], runs: Sequence[Learned]) -> str:
    """Return the results as a Markdown page."""
    versions_text = ", ".join(f"{name} {document[name]}" for name in ("torch", "megatron-core", "transformers"))
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    head = [
        "# Learning curves",
        "",
        f"{document['device']}, commit {document['commit']}, Python {document['python']}, {versions_text}.",
        f"Seeds {seeds}: mean, minimum and maximum. A reward is the mean of {WINDOW} steps.",
        "",
    ]
    return "\n".join([*head, *tables(runs)])


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", nargs="*", default=CONFIGS, metavar="CONFIG")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lags", type=int, nargs="+", choices=(0, 1), default=[0, 1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--override", nargs="+", default=[], metavar="key=value", help="override for every run")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arms = [
        Arm(config, method, lag, seed, tuple(arguments.override))
        for seed in arguments.seeds
        for config in arguments.configs
        for lag in arguments.lags
        for method in arguments.methods
    ]
    try:
        for arm in arms:
            load_config(arm.config, arm.overrides())  # raises errors in settings before the first run
        runs = [Learned.of(arm, train(arm, arguments.out)) for arm in arms]
    except (ConfigError, ValueError, RuntimeError) as error:
        print(f"learning.py: error: {error}", file=sys.stderr)
        return 2
    document = {"benchmark": "learning", **versions(), "runs": [asdict(run) for run in runs]}
    (arguments.out / "learning.json").write_text(json.dumps(document, indent=1))
    (arguments.out / "learning.md").write_text(text := page(document, runs))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
