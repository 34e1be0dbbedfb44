"""Report of a run in a terminal: the course of a metric and the paths of files. Several runs are compared."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.commands import path_option
from megappo.errors import ConfigError, nearest_word, one_line, reason, writing
from megappo.files.plain_files import plain_text
from megappo.observe.changes import change_notes
from megappo.observe.metric_docs import over_steps
from megappo.observe.metrics import metric_value, read_metrics
from megappo.observe.terminal.charts import curve
from megappo.observe.timing.step_profile import newest_page

if TYPE_CHECKING:
    from megappo.observe.page.runs import RunMetrics

_METRIC = "reward/mean"
_WINDOW_STEPS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo report`."""
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", nargs="+", type=path_option, help="directory of a run; several are compared"
    )
    parser.add_argument(
        "--metric", help=f"name in metrics.jsonl (default: {_METRIC}, in a picture the first of a page)"
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=path_option,
        help="write a page with metrics, settings and samples of the runs instead",
    )
    parser.add_argument(
        "--png", metavar="FILE", type=path_option, help="write a picture of curves, instead (needs matplotlib)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the report or write it to files."""
    if arguments.html is None and arguments.png is None:
        print(report(*arguments.run_dirs, metric=arguments.metric or _METRIC))
        return
    from megappo.observe.page.runs import read_runs

    runs = read_runs([Path(directory) for directory in arguments.run_dirs])
    if arguments.html is not None:
        from megappo.commands.report_page import page_of

        print(_written("--html", Path(arguments.html), page_of(runs)))
    if arguments.png is not None:
        print(_written("--png", Path(arguments.png), _picture(runs, arguments.metric)))


def _picture(runs: Sequence[RunMetrics], metric: str | None) -> bytes:
    from megappo.observe.page.curves import first_shown, ordered
    from megappo.observe.page.picture import curves_picture

    known = ordered(set[str]().union(*(run.names for run in runs)))
    if metric is not None and metric not in known:
        raise ValueError(f"no run has the metric '{metric}'; {_remedy(metric, known)}")
    return curves_picture(runs, first_shown(known) if metric is None else [metric])


def report(*run_dirs: str, metric: str = _METRIC) -> str:
    """Return a chart of `metric` over its steps, its first and last values, and the paths of files.

    For several runs, return the charts and the metric at the last step that all runs have.

    If every step has the metric, the last value aggregates the last five steps. The aggregate is the mean, or the
    maximum for metrics that are maxima. Otherwise, for example for metrics of evaluations, the last value is the value
    of the last step that has the metric.

    Raises ValueError if a directory does not belong to a run or the metric was never logged.
    """
    histories = [_read(Path(run_dir), metric) for run_dir in run_dirs]
    if len(histories) == 1:
        return "\n".join([*_chart(histories[0], metric), *_paths(histories[0].directory)])
    charts = ["\n".join([f"{history.directory}:", *_chart(history, metric), ""]) for history in histories]
    return "\n".join([*charts, _comparison(histories, metric)])


def _written(option: str, path: Path, content: bytes) -> str:
    """Write a file and return a message. Raises ConfigError for an invalid path and OSError for a full disk."""
    try:
        with writing(path):
            path.write_bytes(content)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise ConfigError(
            f"{option} is '{path}', which cannot be written ({error.strerror}); name a file in an existing folder"
        ) from error
    return f"{path}: {len(content) / 1e3:,.0f} kB"


@dataclass(frozen=True)
class _History:
    """Finite values of a metric in a run."""

    directory: Path
    steps: list[int]
    values: list[float]

    @property
    def of_every_step(self) -> bool:
        """Whether every step has the metric. Evaluations skip steps."""
        return self.steps[-1] - self.steps[0] + 1 == len(self.steps)


def _read(directory: Path, metric: str) -> _History:
    path = directory / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{directory} holds no metrics.jsonl; name the directory of a run")
    lines = read_metrics(path)
    values = {line["step"]: metric_value(line[metric], path) for line in lines if metric in line and metric != "step"}
    values = {step: value for step, value in values.items() if math.isfinite(value)}
    if not values:
        known = sorted({name for line in lines for name in line} - {"step"})
        raise ValueError(
            f"the run in {directory} has no finite value of the metric '{metric}'; {_remedy(metric, known)}"
        )
    return _History(directory, list(values), list(values.values()))


def _remedy(metric: str, known: Sequence[str]) -> str:
    near = nearest_word(metric, known, cutoff=0.6)
    return f"did you mean {near}?" if near not in (None, metric) else f"it has {', '.join(known) or 'none'}"


def _chart(history: _History, metric: str) -> list[str]:
    steps, values = history.steps, history.values
    if len(values) == 1:
        return [f"{metric} has one value: {values[0]:.3f} at step {steps[0]}"]
    first = f"{values[0]:.3f} in the first step" if steps[0] == 1 else f"{values[0]:.3f} at step {steps[0]}"
    if history.of_every_step:
        over = f"over {len(values)} steps"
        comparison = f"{first}, {_result(history, metric):.3f} in the last {min(_WINDOW_STEPS, len(values))}"
    else:
        over = f"at {len(values)} steps from {steps[0]} to {steps[-1]}"
        comparison = f"{first}, {values[-1]:.3f} at step {steps[-1]}"
    verdict = "rose" if _result(history, metric) > values[0] else "did not rise"
    return [
        f"{metric} {over}",
        curve(values, ends=(steps[0], steps[-1]), combine=partial(over_steps, metric)),
        f"{metric} {verdict}: {comparison}",
    ]


def _result(history: _History, metric: str) -> float:
    return over_steps(metric, history.values[-_WINDOW_STEPS:] if history.of_every_step else history.values[-1:])


def _paths(directory: Path) -> list[str]:
    traced = newest_page(directory)
    return [
        f"metrics: {directory / 'metrics.jsonl'}",
        f"samples: {directory / 'samples.jsonl'}",
        f"configuration: {directory / 'config.yaml'}",
        *(f"settings changed {one_line(note)}" for note in change_notes(directory)),
        *([f"trained actor: {directory / 'final'}"] if (directory / "final").is_dir() else []),
        *(["", *_page(traced)] if traced is not None else []),
    ]


def _page(path: Path) -> list[str]:
    """Return the lines of a page. Control characters for terminals are escaped."""
    try:
        return [line if line.isprintable() else one_line(line) for line in plain_text(path).rstrip().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        return [f"{path} cannot be read: {reason(error)}"]


def _comparison(histories: list[_History], metric: str) -> str:
    common = set.intersection(*(set(history.steps) for history in histories))
    if not common:
        return f"no step has {metric} in all of these runs"
    step = max(common)
    values = [(history.values[history.steps.index(step)], history.directory) for history in histories]
    comparison = ", ".join(f"{value:.3f} in {directory}" for value, directory in values)
    return f"{metric} at step {step}, the last of all: {comparison}"
