"""A logger that writes selected metrics to a CSV file in the run directory."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class CsvLogger:
    """Rows of the step and the selected metrics."""

    def __init__(self, *, directory: Path, run_name: str, config: Any, names: Sequence[str]) -> None:
        self._path, self._names = Path(directory) / f"{run_name}.csv", names

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row."""
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow([step, *(metrics.get(name, "") for name in self._names)])

    def forget_after(self, step: int) -> None:
        """Remove the rows of later steps. A run that resumes from a checkpoint logs these steps again."""
        if self._path.exists():
            rows = [row for row in csv.reader(self._path.open(newline="")) if int(row[0]) <= step]
            with self._path.open("w", newline="") as file:
                csv.writer(file).writerows(rows)

    def close(self) -> None:
        """Do nothing, because each row is written at once."""
