"""The metrics of the runs that a page or a picture compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.observe.metrics import metric_value, read_metrics
from megappo.observe.page.curves import Line


@dataclass(frozen=True)
class RunMetrics:
    """A run's metrics."""

    label: str
    """Short name that tells it from the others."""
    directory: Path
    lines: dict[int, Line]
    """By step; at least one."""

    @property
    def names(self) -> set[str]:
        """Names of all metrics that any step has."""
        return {name for line in self.lines.values() for name in line}


def read_runs(directories: Sequence[Path]) -> list[RunMetrics]:
    """Raises ValueError for a directory that is not a run's, or whose metrics.jsonl is damaged or empty."""
    names = [directory.resolve().name for directory in directories]
    labels = names if len(set(names)) == len(names) else [str(directory) for directory in directories]
    return [RunMetrics(label, place, _lines(place)) for label, place in zip(labels, directories, strict=True)]


def _lines(directory: Path) -> dict[int, Line]:
    path = directory / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{directory} holds no metrics.jsonl; name the directory of a run")
    lines: dict[int, Line] = {
        line["step"]: {name: metric_value(value, path) for name, value in line.items() if name != "step"}
        for line in read_metrics(path)
    }
    if not lines:
        raise ValueError(f"{path} has no step yet; wait until the run has ended its first")
    return lines
