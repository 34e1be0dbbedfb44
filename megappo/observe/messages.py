"""Messages of a process to its user: above the view of a run while it is drawn, otherwise on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

_CLOSE_SECONDS = 1.0


class View:
    """Shows a run in a terminal, called by the reporter of rank 0. This base class shows messages only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin_step(self, step: int) -> None:
        """Note that a step begins."""

    def stage(self, name: str) -> None:
        """Note that a stage of the step begins."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step; any metric may be missing."""

    def message(self, text: str) -> None:
        """Print a line that stays, even where other lines are redrawn."""
        print(text, file=self._stream, flush=True)

    def warn(self, text: str) -> None:
        """Print a line that stays visible while the run goes on, where the view has a place for it."""
        self.message(text)

    def close(self) -> None:
        """Restore the terminal; may be called twice."""


class SteadyView(View):
    """Wraps another view and ignores its OSErrors: a run must go on although its terminal or log file fails, and there
    is no other place to report it."""

    def __init__(self, view: View) -> None:
        self._view = view

    def begin_step(self, step: int) -> None:
        """Forward to the wrapped view."""
        with suppress(OSError):
            self._view.begin_step(step)

    def stage(self, name: str) -> None:
        """Forward to the wrapped view."""
        with suppress(OSError):
            self._view.stage(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward to the wrapped view."""
        with suppress(OSError):
            self._view.step(step, metrics)

    def message(self, text: str) -> None:
        """Forward to the wrapped view."""
        with suppress(OSError):
            self._view.message(text)

    def warn(self, text: str) -> None:
        """Forward to the wrapped view."""
        with suppress(OSError):
            self._view.warn(text)

    def close(self) -> None:
        """Forward to the wrapped view."""
        with suppress(OSError):
            self._view.close()


class Messages:
    """The one way for all output of a process that is not its result. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._view: View | None = None

    def show_in(self, view: View | None) -> None:
        """Show messages in a run's view from now on; None: on stderr again."""
        self._view = view

    def tell(self, text: str, *, warns: bool = False) -> None:
        """Print a line; above the view while a run is shown, in which a line that `warns` stays visible."""
        with self._lock, suppress(OSError):  # there is no other place to report it
            if self._view is not None:
                (self._view.warn if warns else self._view.message)(text)
            else:
                print(f"megappo: {text}", file=sys.stderr, flush=True)

    def tell_last(self, text: str, before: str = "") -> None:
        """Print the last line of a process that ends now, after restoring the terminal if that takes no time. `before`
        is printed above it unchanged, for example a traceback. Prints nothing where both are empty."""
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
