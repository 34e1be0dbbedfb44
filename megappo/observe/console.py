"""What a person at the terminal sees."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_LINE = (
    ("reward", "reward/mean", ".3f"),
    ("kl", "kl/mean", ".4f"),
    ("ppo_kl", "actor/ppo_kl_k3", ".2e"),
    ("clip", "actor/clipfrac", ".3f"),
    ("entropy", "actor/entropy", ".3f"),
    ("ev", "critic/explained_variance", ".2f"),
    ("length", "response/length", ".1f"),
    ("tok/s", "tokens_per_second", ".0f"),
    ("s", "time/step", ".2f"),
)
_TABLE = tuple(dict.fromkeys([*(name for _, name, _ in _LINE), "actor/grad_norm", "critic/loss", "mismatch/mean"]))
_KEPT_STEPS = 60


class View(Protocol):
    """A way to show a run."""

    def begin_step(self, step: int) -> None:
        """A step begins."""

    def stage(self, name: str) -> None:
        """A stage of the step begins."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""

    def message(self, text: str) -> None:
        """Say something that must not be overwritten."""

    def close(self) -> None:
        """Give the terminal back."""


def _blocks(stream: TextIO) -> str:
    """Characters of rising height that the terminal can show."""
    encoding = (getattr(stream, "encoding", None) or "ascii").lower()
    return "▁▂▃▄▅▆▇█" if "utf" in encoding else "_.-=*#"


def sparkline(values: Sequence[float], width: int, *, blocks: str = "▁▂▃▄▅▆▇█") -> str:
    """The last `width` finite values as characters of rising height."""
    shown = [v for v in values if math.isfinite(v)][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((v - low) * scale)] for v in shown)


def curve(values: Sequence[float], width: int = 60, height: int = 10, *, mark: str = "*") -> str:
    """A chart of values over their positions, with the range at its left and the number of values below."""
    shown = [v for v in values if math.isfinite(v)]
    if not shown:
        return "(nothing to show)"
    columns = min(width, len(shown))
    means = []
    for column in range(columns):
        part = shown[column * len(shown) // columns : (column + 1) * len(shown) // columns]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    rows = [[" "] * columns for _ in range(height)]
    for x, value in enumerate(means):
        y = round((value - low) / (high - low) * (height - 1)) if high > low else 0
        rows[height - 1 - y][x] = mark
    labels = {0: f"{high:8.3f} |", height - 1: f"{low:8.3f} |"}
    lines = [labels.get(y, " " * 9 + "|") + "".join(row).rstrip() for y, row in enumerate(rows)]
    axis = " " * 9 + "+" + "-" * columns
    return "\n".join([*lines, axis, " " * 10 + f"1{len(shown):>{max(1, columns - 1)}}"])


class QuietView:
    """Messages only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin_step(self, step: int) -> None:
        """Nothing."""

    def stage(self, name: str) -> None:
        """Nothing."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """A line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing."""


class PlainView(QuietView):
    """One line per step."""

    def __init__(self, stream: TextIO, total_steps: int) -> None:
        super().__init__(stream)
        self._total = total_steps

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The key metrics that there are."""
        parts = [f"{label} {metrics[name]:{form}}" for label, name, form in _LINE if name in metrics]
        self.message(f"step {step}/{self._total}  " + "  ".join(parts))


class LiveView:
    """Progress, stage, metrics and step times, redrawn in place."""

    def __init__(self, stream: TextIO, total_steps: int) -> None:
        self._console = Console(file=stream)
        self._blocks = _blocks(stream)
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("starting", total=total_steps)
        self._history: dict[str, deque[float]] = {name: deque(maxlen=_KEPT_STEPS) for name in _TABLE}
        self._times: dict[str, float] = {}
        self._live = Live(self._progress, console=self._console, refresh_per_second=4)
        self._live.start()

    def begin_step(self, step: int) -> None:
        """Nothing; the bar moves when a step is done."""

    def stage(self, name: str) -> None:
        """Name the stage beside the bar."""
        self._progress.update(self._task, description=name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Redraw."""
        for name, history in self._history.items():
            if name in metrics:
                history.append(metrics[name])
        self._times = {n.removeprefix("time/"): v for n, v in metrics.items() if n.startswith("time/")}
        self._progress.update(self._task, completed=step)
        self._live.update(Group(self._table(), self._progress))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("metric", "last", "", "stage", "seconds"):
            table.add_column(column)
        metrics = [
            (name, f"{history[-1]:.4g}", sparkline(history, 24, blocks=self._blocks))
            for name, history in self._history.items()
            if history
        ]
        times = [(name, f"{seconds:.2f}") for name, seconds in self._times.items()]
        for row in range(max(len(metrics), len(times))):
            left = metrics[row] if row < len(metrics) else ("", "", "")
            right = times[row] if row < len(times) else ("", "")
            table.add_row(*left, *right)
        return table

    def message(self, text: str) -> None:
        """A line above the live area."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._live.stop()


def make_view(mode: Literal["auto", "live", "plain", "quiet"], total_steps: int, stream: TextIO | None = None) -> View:
    """The view of a mode; `auto` is live on a terminal and plain elsewhere."""
    stream = stream if stream is not None else sys.stdout
    if mode == "auto":
        mode = "live" if stream.isatty() else "plain"
    if mode == "live":
        return LiveView(stream, total_steps)
    return PlainView(stream, total_steps) if mode == "plain" else QuietView(sys.stderr)
