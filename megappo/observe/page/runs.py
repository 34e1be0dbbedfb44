"""Metrics of the runs of a page or a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.observe.metrics import metric_value, read_metrics
from megappo.observe.page.curves import Line


@dataclass(frozen=True)
class RunMetrics:
    """Metrics of a run."""

    label: str
    """Short unique name of the run."""
    directory: Path
    lines: dict[int, Line]
    """Metrics by step; at least one step."""

    @property
    def names(self) -> set[str]:
        """Names of the metrics of all steps."""
        return {name for line in self.lines.values() for name in line}


def read_runs(directories: Sequence[Path]) -> list[RunMetrics]:
    """Read the metrics of runs. Raises ValueError if a directory has no metrics.jsonl, or if the file is damaged or
    empty."""
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
        raise ValueError(f"{path} has no step yet; wait for the first step of the run")
    return lines
