"""Messages of a process for the user: above the view of a run, or on stderr without a view."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

_CLOSE_SECONDS = 1.0


class View:
    """Shows a run in a terminal. The reporter of rank 0 calls the view. This base class only shows messages."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin_step(self, step: int) -> None:
        """Start a step."""

    def stage(self, name: str) -> None:
        """Start a stage of the step."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step. Any metric may be missing."""

    def message(self, text: str) -> None:
        """Print a permanent line, even if other lines are redrawn."""
        print(text, file=self._stream, flush=True)

    def warn(self, text: str) -> None:
        """Print a line that stays visible during the run, if the view supports this."""
        self.message(text)

    def close(self) -> None:
        """Restore the terminal. May be called twice."""


class SteadyView(View):
    """Wraps another view and ignores OSErrors. A run must continue if the terminal or the log file fails, and no other
    output can report the failure."""

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
    """All output of a process except results. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._view: View | None = None

    def show_in(self, view: View | None) -> None:
        """Show later messages in the view of a run. With None, messages appear on stderr."""
        self._view = view

    def show(self, text: str, *, warns: bool = False) -> None:
        """Print a line above the view of a run, or on stderr without a view. With `warns`, the line stays visible."""
        with self._lock, suppress(OSError):  # no other output can report the failure
            if self._view is not None:
                (self._view.warn if warns else self._view.message)(text)
            else:
                print(f"megappo: {text}", file=sys.stderr, flush=True)

    def show_last(self, text: str, before: str = "") -> None:
        """Print the last line of a process after restoring the terminal, for at most a second. `before`, for example a
        traceback, is printed unchanged above the line. If both texts are empty, nothing is printed."""
        if self._view is not None:
            closing = threading.Thread(target=self._view.close, daemon=True)
            closing.start()
            closing.join(_CLOSE_SECONDS)
        if output := before + (f"megappo: {text}" if text else ""):
            with suppress(OSError):  # as above
                print(output.rstrip("\n"), file=sys.stderr, flush=True)


MESSAGES = Messages()
"""Messages of this process."""
show_message = MESSAGES.show
