"""Console output of a run."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import zip_longest
from types import MappingProxyType
from typing import Literal, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megappo.observe.evaluations import evaluation_label, evaluation_results
from megappo.observe.terminal.charts import ASCII_BLOCKS, BLOCKS, sparkline
from megappo.observe.terminal.messages import View
from megappo.observe.terminal.progress import PROGRESS, StageProgress, duration
from megappo.observe.terminal.streams import accept_any_text

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
"""Label, metric and format of each item of a plain line, after the results of an evaluation."""
_TABLE = (*(name for _, name, _ in _LINE), "actor/grad_norm", "critic/loss", "mismatch/mean")
_FAILURES = {"reward/failures": "failed rewards", "episode/failures": "failed episodes"}
"""Metrics that are shown if they are not 0, with labels."""
_NO_THRESHOLDS: Mapping[str, float] = MappingProxyType({})
_SHOWN_STEPS = 60
_SPARKLINE_COLUMNS = 24
_SHOWN_WARNINGS = 3
_OF_STEP = re.compile(r"step \d+: ")
# By default, the progress bar ignores steps older than 30 seconds and has no ETA for longer steps.
_ETA_WINDOW_SECONDS = 6 * 3600.0


class PlainView(View):
    """Prints one line per step, and one line per minute in longer stages."""

    def __init__(
        self,
        stream: TextIO,
        total_steps: int,
        progress: StageProgress = PROGRESS,
        *,
        every_seconds: float = 60.0,
        clock: Callable[[], float] = time.time,
        right_above: Mapping[str, float] = _NO_THRESHOLDS,
    ) -> None:
        """Create the view.

        Args:
            stream: output stream.
            total_steps: number of steps of the run.
            progress: progress of the current stage.
            every_seconds: interval between lines in a long stage.
            clock: seconds since 1970. Lines show the local time of day.
            right_above: see `evaluation_label`.
        """
        super().__init__(stream)
        self._right_above = right_above
        self._clock = clock
        self._begun: tuple[int, float] | None = None
        """First step of this process, and the start time of the step."""
        self._total_steps, self._progress, self._every_seconds = total_steps, progress, every_seconds
        self._step: int | None = None
        self._closed = threading.Event()
        self._lines = 0
        """Number of lines printed in this stage so far."""
        self._thread: threading.Thread | None = None

    def begin_step(self, step: int) -> None:
        """Store the step for the following lines. The first step starts the clock of the ETA."""
        self._step = step
        if self._begun is None:
            self._begun = (step, self._clock())

    def stage(self, name: str) -> None:
        """Reset the count of lines. The first stage starts the thread that reports long stages."""
        self._lines = 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread that reports long stages."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._every_seconds / 4)):
            if self._progress.seconds >= (self._lines + 1) * self._every_seconds:
                self._lines = int(self._progress.seconds / self._every_seconds)
                of_step = "" if self._step is None else f"step {self._step}: "
                self.message(f"{of_step}{self._progress.text()} ({self._time_of_day()})")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's key metrics, the time of day, and the estimated time for the remaining steps."""
        results = evaluation_results(metrics)
        parts = [f"{evaluation_label(name, self._right_above)} {metrics[name]:.3f}" for name in results]
        parts += [f"{label} {metrics[name]:{form}}" for label, name, form in _LINE if name in metrics]
        parts += [f"{label} {metrics[name]:.1%}" for name, label in _FAILURES.items() if metrics.get(name)]
        parts += [self._time_of_day(), *self._left(step)]
        self.message("  ".join([f"step {step}/{self._total_steps}", *parts]))

    def _time_of_day(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self._clock()))

    def _left(self, step: int) -> list[str]:
        """Return the ETA from the mean time per step so far, including evaluations and checkpoints."""
        if self._begun is None or step >= self._total_steps:
            return []
        first, since = self._begun
        pace = (self._clock() - since) / (step + 1 - first)
        return [f"ETA {duration(pace * (self._total_steps - step))}"]


class _Doing:
    """Progress of the stage, updated whenever the screen is drawn."""

    def __init__(self, progress: StageProgress) -> None:
        self._progress = progress

    def __rich__(self) -> Text:
        return Text(self._progress.text(), overflow="ellipsis", no_wrap=True)


class LiveView(View):
    """Redraws in place: last message, progress with ETA, stage and its progress, last warnings, metrics and step
    times."""

    def __init__(
        self,
        stream: TextIO,
        total_steps: int,
        progress: StageProgress = PROGRESS,
        *,
        right_above: Mapping[str, float] = _NO_THRESHOLDS,
    ) -> None:
        """Create the view. The first call draws the view, so a run that fails at startup does not change the
        terminal."""
        self._right_above = right_above
        self._doing = _Doing(progress)
        self._console = Console(file=stream, force_terminal=True)
        self._blocks = BLOCKS if self._console.encoding.startswith("utf") else ASCII_BLOCKS
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=_ETA_WINDOW_SECONDS,
        )
        self._task = self._progress.add_task("starting", total=total_steps)
        shown = (*_TABLE, *_FAILURES)
        self._history: dict[str, deque[float]] = {name: deque(maxlen=_SHOWN_STEPS) for name in shown}
        """Last values of each metric. An evaluation result is added when it is first logged."""
        self._times: dict[str, float] = {}
        self._step: int | None = None
        self._note: str | None = None
        self._warnings: list[str] = []
        self._live = Live(console=self._console, refresh_per_second=4, vertical_overflow="crop")
        self._closed = False

    def begin_step(self, step: int) -> None:
        """Start the clock of the ETA at the first step."""
        if self._step is None:
            self._progress.reset(self._task, completed=step - 1)
        self._step = step
        self._draw()

    def stage(self, name: str) -> None:
        """Show the name of the stage next to the bar."""
        description = name if self._step is None else f"step {self._step}: {name}"
        self._progress.update(self._task, description=description)
        self._draw()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the step's metrics and move the bar."""
        for name in evaluation_results(metrics):
            self._history.setdefault(name, deque(maxlen=_SHOWN_STEPS))
        for name, history in self._history.items():
            if name in metrics and (metrics[name] or history or name not in _FAILURES):
                history.append(metrics[name])
        self._times = {n.removeprefix("time/"): v for n, v in metrics.items() if n.startswith("time/")}
        self._progress.update(self._task, completed=step)
        self._draw()

    def message(self, text: str) -> None:
        """Show a message above the bar. The previous message moves to the scrollback, so each message is printed
        once."""
        if self._closed:
            self._console.print(text, markup=False, highlight=False)
            return
        before, self._note = self._note, text
        self._draw()
        if before is not None:
            self._console.print(before, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        """Show a warning below the bar. A warning that is repeated or replaced by newer warnings moves to the
        scrollback."""
        if self._closed:
            self.message(text)
            return
        sentence = _OF_STEP.sub("", text)
        again = [warning for warning in self._warnings if _OF_STEP.sub("", warning) == sentence]
        remaining = [*(warning for warning in self._warnings if warning not in again), text]
        gone = again + remaining[:-_SHOWN_WARNINGS]
        self._warnings = remaining[-_SHOWN_WARNINGS:]
        self._draw()
        for warning in gone:
            self._console.print(warning, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if not self._closed:
            self._closed = True
            self._live.stop()

    def _draw(self) -> None:
        if self._closed:
            return
        warnings = [Text(warning, style="yellow") for warning in self._warnings]
        parts: list[RenderableType] = [self._progress, self._doing, *warnings, self._table()]
        if self._note is not None:
            parts.insert(0, Text(self._note, style="yellow"))
        self._live.update(Group(*parts), refresh=self._live.is_started)
        self._live.start()

    def _table(self) -> Table:
        """Return a table. The left part shows the last value and the history of each metric. The right part shows the
        seconds and the share of each stage."""
        table = Table(box=None, pad_edge=False)
        table.add_column("metric")
        table.add_column("last", justify="right")
        table.add_column(f"last {_SHOWN_STEPS} steps", no_wrap=True)
        table.add_column("stage")
        table.add_column("seconds", justify="right")
        table.add_column("share", justify="right")
        results = {name: evaluation_label(name, self._right_above) for name in evaluation_results(self._history)}
        labels = results | {name: name for name in self._history if name not in results}
        metrics = [
            (label, f"{history[-1]:.4g}", sparkline(history, _SPARKLINE_COLUMNS, blocks=self._blocks))
            for name, label in labels.items()
            if (history := self._history[name])
        ]
        whole = self._times.get("step") or sum(self._times.values())
        times = [
            (name, f"{seconds:.2f}", f"{seconds / whole:.0%}" if whole > 0 else "")
            for name, seconds in self._times.items()
        ]
        for left, right in zip_longest(metrics, times, fillvalue=("", "", "")):
            table.add_row(*map(Text, (*left, *right)))
        return table


def make_view(
    mode: Literal["auto", "live", "plain", "quiet"],
    total_steps: int,
    stream: TextIO | None = None,
    *,
    right_above: Mapping[str, float] = _NO_THRESHOLDS,
) -> View:
    """Return the view of a mode. `auto` selects `live` on a terminal and `plain` otherwise.

    The view writes to `stream`, by default standard output, or standard error with `quiet`. `right_above`: see
    `evaluation_label`.
    """
    if stream is None:
        stream = sys.stderr if mode == "quiet" else sys.stdout
    accept_any_text(stream)
    if mode == "auto":
        drawable = stream.isatty() and not Console(file=stream).is_dumb_terminal
        mode = "live" if drawable else "plain"
    if mode == "live":
        return LiveView(stream, total_steps, right_above=right_above)
    return PlainView(stream, total_steps, right_above=right_above) if mode == "plain" else View(stream)
