"""What a process tells the person who started it: above the view of a run while that is drawn, else on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

_CLOSE_SECONDS = 1.0


class View:
    """What shows a run in a terminal, called by the reporter of rank 0; this one shows messages alone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin_step(self, step: int) -> None:
        """A step begins."""

    def stage(self, name: str) -> None:
        """A stage of the step begins."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done; any metric may be missing."""

    def message(self, text: str) -> None:
        """Print a line that stays, also where other lines are redrawn."""
        print(text, file=self._stream, flush=True)

    def warn(self, text: str) -> None:
        """Print a line that stays in sight while the run goes on, where there is a place for it."""
        self.message(text)

    def close(self) -> None:
        """Give the terminal back; may be called twice."""


class SteadyView(View):
    """Another view, whose terminal or log file may fail: a run goes on that cannot be seen, as there is no place left
    where to say so."""

    def __init__(self, view: View) -> None:
        self._view = view

    def begin_step(self, step: int) -> None:
        """As the other view does."""
        with suppress(OSError):
            self._view.begin_step(step)

    def stage(self, name: str) -> None:
        """As the other view does."""
        with suppress(OSError):
            self._view.stage(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """As the other view does."""
        with suppress(OSError):
            self._view.step(step, metrics)

    def message(self, text: str) -> None:
        """As the other view does."""
        with suppress(OSError):
            self._view.message(text)

    def warn(self, text: str) -> None:
        """As the other view does."""
        with suppress(OSError):
            self._view.warn(text)

    def close(self) -> None:
        """As the other view does."""
        with suppress(OSError):
            self._view.close()


class Messages:
    """The one way for everything in a process that is not its output; any thread may call anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._view: View | None = None

    def show_in(self, view: View | None) -> None:
        """A run's view is drawn from now on; None: no longer."""
        self._view = view

    def tell(self, text: str, *, warns: bool = False) -> None:
        """Print a line; above the view while a run is shown, in which one that `warns` stays in sight."""
        with self._lock, suppress(OSError):  # nothing is left that could say that nothing can be said
            if self._view is not None:
                (self._view.warn if warns else self._view.message)(text)
            else:
                print(f"megappo: {text}", file=sys.stderr, flush=True)

    def tell_last(self, text: str, before: str = "") -> None:
        """The same from a process that ends at once, whose terminal is given back before, if that takes no time.
        `before` is printed above it as it is, such as a traceback; nothing where both are empty."""
        if self._view is not None:
            closing = threading.Thread(target=self._view.close, daemon=True)
            closing.start()
            closing.join(_CLOSE_SECONDS)
        if said := before + (f"megappo: {text}" if text else ""):
            with suppress(OSError):  # as above
                print(said.rstrip("\n"), file=sys.stderr, flush=True)


MESSAGES = Messages()
"""The messages of this process."""
tell = MESSAGES.tell
