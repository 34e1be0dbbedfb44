#!/usr/bin/env python3
"""What is learned with PPO's clipped loss, with SAO's, and without a critic by GRPO, from new samples and older ones?

Usage: python -m benchmarks.learning [CONFIG ...] --out FOLDER [--methods clip dis grpo] [--lags 0 1] [--seeds 1 2 3]
           [--override key=value ...]

Runs `megappo train` on one process for every configuration (those of SAO for two cores without one), method, lag and
seed, one run after the other. `clip` and `dis` have the configuration's critic, and differ in `algorithm.policy_loss`
alone; `grpo` has groups of eight in place of it, in as many samples a step. A lag of 1 comes from an engine of the
tests, which answers with the weights of the step before. Metrics of each run lie in `--out`; what lies there is not run
again, so it may be stopped and goes on. Then it writes `learning.json`, for plots.py, and `learning.md` there.
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

from benchmarks.step import versions
from megappo.config import ConfigError, load_config
from megappo.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = [f"configs/recipes/{name}.yaml" for name in ("sao_two_cores", "sao_tool_two_cores")]
GROUP = 8
"""Samples of a prompt for `grpo`."""
METHODS = ("clip", "dis", "grpo")
LAGGED = ("rollout.engine=tests.support.ticking:TickingEngine", "rollout.ahead=1")
QUIET = ("evaluation=null", "logging.tensorboard=false", "runtime.threads_per_rank=1", "actor.layout={}")
GOAL = 0.9
"""The mean reward that is to be reached."""
WINDOW = 5
"""Steps over which a reward is a mean."""


@dataclass(frozen=True)
class Arm:
    """One run."""

    config: str
    method: str
    lag: int
    seed: int
    given: tuple[str, ...] = ()
    """Settings for all runs."""

    @property
    def name(self) -> str:
        """Name of the run's file."""
        return f"{Path(self.config).stem}-{self.method}-lag{self.lag}-seed{self.seed}"

    def overrides(self) -> list[str]:
        """Overrides of the configuration. Raises ConfigError, and ValueError where groups do not fit."""
        words = [*QUIET, *self.given, f"run.seed={self.seed}", *(LAGGED if self.lag else ())]
        if self.method != "grpo":
            return [*words, "critic.layout={}", f"algorithm.policy_loss={self.method}"]
        samples = load_config(self.config, list(self.given)).rollout.batch_sequences
        if samples % GROUP:
            raise ValueError(f"{self.config} has {samples} samples a step, no multiple of {GROUP}; leave grpo out")
        words += [f"rollout.samples_per_prompt={GROUP}", f"rollout.prompts_per_step={samples // GROUP}"]
        return [*words, "critic=null", "algorithm.estimator=grpo", "algorithm.lam=1", "algorithm.policy_loss=clip"]


@dataclass(frozen=True)
class Learned:
    """Course of a run's learning, step by step."""

    task: str
    method: str
    lag: int
    seed: int
    rewards: list[float]
    explained: list[float]
    """Variance of the returns that the critic explains; empty without one."""
    left_out: list[float]
    """Share of the tokens that `dis` leaves out for their ratio, or whose gain is clipped; of steps that update the
    actor."""
    seconds: float
    """Seconds of all steps."""

    @classmethod
    def of(cls, arm: Arm, lines: Sequence[dict[str, Any]]) -> Learned:
        """Read it from a run's metrics."""
        steps = [line for line in lines if "reward/mean" in line]
        explained = [line["critic/explained_variance"] for line in steps if "critic/explained_variance" in line]
        names = ("actor/masked_below", "actor/masked_above") if arm.method == "dis" else ("actor/clipfrac",)
        left_out = [sum(line[name] for name in names) for line in steps if "actor/updates" in line]
        rewards, seconds = [line["reward/mean"] for line in steps], sum(line["time/step"] for line in steps)
        return cls(Path(arm.config).stem, arm.method, arm.lag, arm.seed, rewards, explained, left_out, seconds)

    def reward(self, step: int) -> float:
        """The mean of the steps up to this one."""
        return statistics.mean(self.rewards[max(0, step - WINDOW) : step])

    @property
    def steps_to_goal(self) -> float:
        """The first step with which the mean is at the goal; infinite where none is."""
        reached = (n for n in range(WINDOW, len(self.rewards) + 1) if self.reward(n) >= GOAL)
        return next(reached, math.inf)


def train(arm: Arm, out: Path) -> list[dict[str, Any]]:
    """The metrics of the run, which is made where there are none. Raises RuntimeError where it fails."""
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
    """After which steps rewards are told: each quarter of them."""
    return sorted({max(1, steps * n // 4) for n in range(1, 5)})


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The mean of seeds, and the least and most of them."""
    shown = [f"{x:.{digits}f}" for x in (statistics.mean(values), min(values), max(values))]
    return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]} to {shown[2]})"


def _goal(runs: Sequence[Learned]) -> str:
    reached = sorted(run.steps_to_goal for run in runs if math.isfinite(run.steps_to_goal))
    told = ", ".join(f"{step:.0f}" for step in reached)
    missed = len(runs) - len(reached)
    return (f"{told}, " if told else "") + f"not in {missed} of {len(runs)}" if missed else told


def _groups(runs: Sequence[Learned]) -> list[list[Learned]]:
    found: dict[tuple[str, int], list[Learned]] = {}
    for run in runs:
        found.setdefault((run.method, run.lag), []).append(run)
    return [found[key] for key in sorted(found, key=lambda key: (key[1], METHODS.index(key[0])))]


def tables(runs: Sequence[Learned]) -> Iterator[str]:
    """A section of Markdown for each task."""
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
    """The results as a page of Markdown."""
    words = ", ".join(f"{name} {document[name]}" for name in ("torch", "megatron-core", "transformers"))
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    head = [
        "# What is learned",
        "",
        f"{document['device']}, commit {document['commit']}, Python {document['python']}, {words}.",
        f"Seeds {seeds}: their mean, and the least and the most of them. A reward is the mean of {WINDOW} steps.",
        "",
    ]
    return "\n".join([*head, *tables(runs)])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", nargs="*", default=CONFIGS, metavar="CONFIG")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lags", type=int, nargs="+", choices=(0, 1), default=[0, 1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--override", nargs="+", default=[], metavar="key=value", help="for every run")
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
            load_config(arm.config, arm.overrides())  # what breaks a rule is told before the first run
        runs = [Learned.of(arm, train(arm, arguments.out)) for arm in arms]
    except (ConfigError, ValueError, RuntimeError) as error:
        print(f"learning.py: error: {error}", file=sys.stderr)
        return 2
    document = {"benchmark": "learning", **versions(), "runs": [asdict(run) for run in runs]}
    (arguments.out / "learning.json").write_text(json.dumps(document, indent=1))
    (arguments.out / "learning.md").write_text(said := page(document, runs))
    print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
