"""Errors that end a run for a reason its user should read, not a traceback, and the exit codes of all ends."""

from __future__ import annotations

import signal

RUN_ERROR = 1
USER_ERROR = 2
REQUEUE = 85
"""Stopped by SIGTERM or SIGUSR1 with a checkpoint: start the same command again (EX_TEMPFAIL of sysexits.h)."""
HANG = 79
"""The watchdog ended a run in which nothing went on; starting it again is worth a try."""
STOPPED_BY_USER = 130
"""Ctrl-C."""


class RunError(RuntimeError):
    """The run cannot go on; the message says why and what to do. The command line exits with code 1."""


class Interrupted(Exception):
    """The run was asked to stop; every rank raises it at the same point, between two updates."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number

    @property
    def exit_code(self) -> int:
        """What the launcher should see."""
        return STOPPED_BY_USER if self.signal == signal.SIGINT else REQUEUE
