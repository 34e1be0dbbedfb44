"""Signals that stop a run. The run finishes or drops its step, writes a checkpoint and ends.

A rank that waits in a collective runs no Python code. A thread therefore reads signals from the wake-up descriptor, to
which the C handler of the interpreter writes them. The rank passes a signal to all other ranks through the store, so
that they stop generating too. A collective then stops all ranks at the same point.
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
from megappo.observe.terminal.messages import MESSAGES, show_message
from megappo.runtime.process import Runtime

# SLURM sends SIGUSR1 before the time limit (launch/slurm/*.sbatch). Schedulers send SIGTERM. A terminal sends SIGHUP
# when it is closed.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A terminal sends Ctrl-C to every process, and torchrun sends it to its workers a second time.
_ONE_PRESS_SECONDS = 1.0
_STOP_NOTICE = "megappo/asked-to-stop"


class Stop(Protocol):
    """State of a stop request, for long-running code."""

    @property
    def requested(self) -> bool:
        """Whether this rank has received a stop request; a cheap check. A caller that drops its work must then call
        `check`."""
        ...

    def check(self) -> None:
        """Raise Interrupted on every rank if any rank has received a stop request; a collective of the world."""
        ...


class NeverStop:
    """A `Stop` for programs without signal handling, such as benchmarks."""

    requested = False

    def check(self) -> None:
        """Do nothing."""


class Interrupts:
    """Signal handling between `start` and `stop`. The main thread of the process calls both methods."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._signal = 0
        self._signal_of_others = 0
        """Number of a signal that another rank received; 0: no signal."""
        self._pressed = 0.0
        self._old_handlers: dict[signal.Signals, signal._HANDLER] = {}
        self._old_descriptor = -1
        self._read, self._write = -1, -1
        self._notices = runtime.notices

    @property
    def requested(self) -> bool:
        """See `Stop.requested`. A signal of another rank arrives within two seconds."""
        return bool(self._signal or self._signal_of_others)

    def start(self) -> None:
        """Install the signal handlers."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # nohup ignores SIGHUP, so that a run continues after its terminal is closed.
        ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [number for number in _SIGNALS if number != signal.SIGHUP or not ignores_hangup]
        self._old_handlers = {number: signal.signal(number, _nothing) for number in numbers}
        threading.Thread(target=self._listen, args=(self._read,), name="signals", daemon=True).start()
        self._notices.listen(_STOP_NOTICE, self._hear)

    def stop(self) -> None:
        """Restore the previous handlers. A second call does nothing."""
        if self._write < 0:
            return
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_descriptor)
        os.close(self._write)  # ends the thread
        self._write = -1

    def check(self) -> None:
        """Raise Interrupted on every rank if any rank has received a stop signal; a collective of the world."""
        # The tensor is in host memory and uses gloo, because servers on the GPUs of waiting ranks may still generate.
        number = torch.tensor([max(self._signal, self._signal_of_others)])
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        if int(number):
            raise Interrupted(signal.Signals(int(number)))

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
                MESSAGES.show_last("stopped at once; the run continues from its newest checkpoint")
            os._exit(STOPPED_BY_USER)  # children end with it; an unfinished checkpoint has no marker
        is_first, self._pressed = not self._signal, self._pressed if self._signal else now
        # SIGINT is the lowest number, so the signal of a scheduler takes precedence over an earlier Ctrl-C.
        self._signal = max(self._signal, number)
        if is_first:
            if not self._signal_of_others:
                self._print_stopping(number)
            with contextlib.suppress(dist.DistError):  # the store is gone, and the run ends anyway
                self._notices.post(_STOP_NOTICE, str(number))

    def _hear(self, number: str) -> None:
        """Handle a signal that any rank has posted, including this one."""
        self._signal_of_others = int(number)
        if not self._signal and self._write >= 0:
            self._print_stopping(self._signal_of_others)

    def _print_stopping(self, number: int) -> None:
        if self._runtime.is_main:
            name = signal.Signals(number).name
            show_message(f"{name}: stopping with a checkpoint as soon as the step allows; Ctrl-C twice stops at once")


@contextlib.contextmanager
def interruptible(runtime: Runtime) -> Iterator[Interrupts]:
    """Handle signals while the block runs."""
    interrupts = Interrupts(runtime)
    interrupts.start()
    try:
        yield interrupts
    finally:
        interrupts.stop()


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing. The interpreter writes only signals with a Python handler to the wake-up descriptor."""
