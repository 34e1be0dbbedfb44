"""A run's result in a terminal: how a metric went, and where everything lies."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from megappo.observe.charts import curve
from megappo.observe.metrics import read_metrics
from megappo.observe.step_profile import newest_page

_WINDOW_STEPS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What follows `megappo report`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("--metric", default="reward/mean", help="name in metrics.jsonl (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Print the report."""
    print(report(arguments.run_dir, arguments.metric))


def report(run_dir: str, metric: str = "reward/mean") -> str:
    """A chart of `metric` over the steps, its first value and the mean of its last five, and the paths to look at.

    Raises ValueError where the directory is not a run's or the metric was never logged.
    """
    directory = Path(run_dir)
    path = directory / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{directory} holds no metrics.jsonl; name the directory of a run")
    lines = read_metrics(path)
    values = [float(line[metric]) for line in lines if metric in line]
    values = [v for v in values if math.isfinite(v)]
    if not values:
        known = sorted({name for line in lines for name in line} - {"step"})
        raise ValueError(f"the run in {directory} has no metric '{metric}'; it has {', '.join(known)}")
    last = values[-_WINDOW_STEPS:]
    result = sum(last) / len(last)
    traced = newest_page(directory)
    verdict = "rose" if result > values[0] else "did not rise"
    return "\n".join(
        [
            f"{metric} over {len(values)} steps",
            curve(values),
            f"{metric} {verdict}: {values[0]:.3f} in the first step, {result:.3f} in the last {len(last)}",
            f"metrics: {path}",
            f"samples: {directory / 'samples.jsonl'}",
            f"configuration: {directory / 'config.yaml'}",
            *([f"trained actor: {directory / 'final'}"] if (directory / "final").is_dir() else []),
            *(["", traced.read_text().rstrip()] if traced is not None else []),
        ]
    )
