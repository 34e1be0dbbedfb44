"""Signals that ask a run to stop: it finishes or drops its step, writes a checkpoint and ends.

A rank that waits in a collective runs no Python, so a thread reads signals from the descriptor that the interpreter's C
handler writes them to. A signal to one rank is passed to all others through the store, so that they stop generating
too; a collective then decides that all of them stop at the same place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from megappo.errors import STOPPED_BY_USER, Interrupted
from megappo.observe.messages import MESSAGES, tell
from megappo.runtime.process import Runtime

# SLURM sends SIGUSR1 before the time limit (launch/slurm/*.sbatch). Schedulers send SIGTERM. A terminal sends SIGHUP
# when it is closed.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A terminal sends Ctrl-C to every process, and torchrun sends it to its workers once more.
_ONE_PRESS_SECONDS = 1.0
_TOLD = "megappo/asked-to-stop"


class Stop(Protocol):
    """Tells long-running code whether the run was asked to stop."""

    @property
    def asked(self) -> bool:
        """Whether this rank knows of a stop; costs nothing. A caller that drops its work because of it must then call
        `check`."""
        ...

    def check(self) -> None:
        """Raise Interrupted on every rank if any of them knows of it; a collective of the world."""
        ...


class NeverStop:
    """A `Stop` for programs that take no signals, such as benchmarks."""

    asked = False

    def check(self) -> None:
        """Does nothing."""


class Interrupts:
    """Listens to signals from `start` to `stop`, both called in the main thread of the process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._signal = 0
        self._heard = 0
        """Number of the signal that another rank received; 0: none."""
        self._pressed = 0.0
        self._old_handlers: dict[signal.Signals, signal._HANDLER] = {}
        self._old_descriptor = -1
        self._read, self._write = -1, -1
        self._notices = runtime.notices

    @property
    def asked(self) -> bool:
        """See `Stop.asked`. A signal of another rank is known here within a second or two."""
        return bool(self._signal or self._heard)

    def start(self) -> None:
        """Install the signal handlers."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # nohup ignores SIGHUP, so that a run continues after its terminal is closed.
        is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [number for number in _SIGNALS if number != signal.SIGHUP or not is_kept]
        self._old_handlers = {number: signal.signal(number, _nothing) for number in numbers}
        threading.Thread(target=self._listen, args=(self._read,), name="signals", daemon=True).start()
        self._notices.listen(_TOLD, self._hear)

    def stop(self) -> None:
        """Restore the previous handlers; may be called twice."""
        if self._write < 0:
            return
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_descriptor)
        os.close(self._write)  # ends the thread
        self._write = -1

    def check(self) -> None:
        """Raise Interrupted on every rank if any of them was asked to stop; a collective of the world."""
        # In host memory, so over gloo: servers on the GPUs of waiting ranks may still generate for others.
        asked = torch.tensor([max(self._signal, self._heard)])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if int(asked):
            raise Interrupted(signal.Signals(int(asked)))

    def _listen(self, descriptor: int) -> None:
        while received := os.read(descriptor, 1):
            self._receive(received[0])
        os.close(descriptor)

    def _receive(self, number: int) -> None:
        if number not in _SIGNALS:
            return
        now = time.monotonic()
        if number == signal.SIGINT and self._signal and now - self._pressed > _ONE_PRESS_SECONDS:
            if self._runtime.is_main:
                MESSAGES.tell_last("stopped at once; the run continues from its newest checkpoint")
            os._exit(STOPPED_BY_USER)  # children end with it; an unfinished checkpoint has no marker
        is_first, self._pressed = not self._signal, self._pressed if self._signal else now
        # SIGINT is the lowest number: what a scheduler sends decides over a key pressed before.
        self._signal = max(self._signal, number)
        if is_first:
            if not self._heard:
                self._tell_stopping(number)
            with contextlib.suppress(dist.DistError):  # the store's holder is gone, and so is the run
                self._notices.post(_TOLD, str(number))

    def _hear(self, number: str) -> None:
        """Handle a signal that another rank, or this one, has posted."""
        self._heard = int(number)
        if not self._signal and self._write >= 0:
            self._tell_stopping(self._heard)

    def _tell_stopping(self, number: int) -> None:
        if self._runtime.is_main:
            name = signal.Signals(number).name
            tell(f"{name}: stopping with a checkpoint as soon as the step allows; Ctrl-C twice stops at once")


@contextlib.contextmanager
def interruptible(runtime: Runtime) -> Iterator[Interrupts]:
    """Listen to signals while the block runs."""
    interrupts = Interrupts(runtime)
    interrupts.start()
    try:
        yield interrupts
    finally:
        interrupts.stop()


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Handler that does nothing: the interpreter writes only signals with a handler to the wake-up descriptor."""
