"""Programs that alternate on one machine. Each side is a group of processes that makes one step per request.

A side without a request waits for its pipe, and uses no CPU time. Its processes start with an empty interpreter, so
their memory contains neither the other side nor the program that compares the sides.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megappo.runtime.memory.allocator import trim_heap

_RESET_PEAK = "5"  # value for clear_refs that resets VmHWM (proc(5))


@dataclass(frozen=True)
class Turn:
    """Measurements of one step of a side."""

    seconds: float
    """Seconds from the request of the step until the last process has finished."""
    cpu_seconds: float
    """CPU seconds of all threads of all processes."""
    peak_bytes: int
    """Sum of the peak memory of each process during the step, including child processes. Shared memory counts for
    each process."""
    metrics: dict[str, float]
    """Metrics of the first process in this step."""


class Turns:
    """Requests and results of steps in a process of a side."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._cpu = 0.0

    def wait(self) -> None:
        """Wait for the request of a step. Exit the process if the requesting program has closed the pipe."""
        try:
            self._pipe.recv()
        except EOFError:
            raise SystemExit(0) from None
        _forget_peaks()
        self._cpu = time.process_time()

    def done(self, metrics: dict[str, float]) -> None:
        """Report that the requested step is complete."""
        self._pipe.send((time.process_time() - self._cpu, _peak_bytes(), metrics))
        trim_heap()

    def ready(self) -> None:
        """Report that the process is ready for requests."""
        self._pipe.send(None)


Work = Callable[..., None]
"""Function of each process of a side: `work(turns, *arguments)`. The function must be importable by name."""


@dataclass
class Side:
    """Processes that share a step."""

    name: str
    processes: list[BaseProcess]
    pipes: list[Connection]
    log: Path
    """Log file with the output of the processes."""
    _request_time: float = field(default=0.0, init=False)

    def request(self) -> None:
        """Request a step."""
        self._request_time = time.perf_counter()
        for pipe in self.pipes:
            pipe.send("step")

    def answer(self) -> Turn:
        """Wait until the step is complete. Raises RuntimeError if a process exits before."""
        answers = [self._receive(pipe) for pipe in self.pipes]
        seconds = time.perf_counter() - self._request_time
        cpu, peak, _ = zip(*answers, strict=True)
        return Turn(seconds, sum(cpu), sum(peak), answers[0][2])

    def turn(self) -> Turn:
        """Request a step and wait until it is done."""
        self.request()
        return self.answer()

    def await_ready(self) -> None:
        """Wait until all processes are ready. Raises RuntimeError if a process exits before."""
        for pipe in self.pipes:
            self._receive(pipe)

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except EOFError:
            text = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"a process of {self.name} ended; the end of its log:\n{text}") from None

    def close(self) -> None:
        """Close the pipes and wait for the processes. Processes that do not exit within 60 seconds are killed."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=60)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def started(name: str, work: Work, arguments: tuple[Any, ...], ranks: int, threads: int, log: Path) -> Iterator[Side]:
    """Start the processes of a side, with the environment of `torchrun`. Each process has `threads` threads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    side = Side(name, [], [], log)
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            world: dict[str, object] = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
            }  # fmt: skip
            world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
            environment = {key: str(value) for key, value in world.items()}
            process = context.Process(target=_run, args=(work, theirs, environment, str(log), arguments))
            process.start()
            theirs.close()
            side.processes.append(process)
            side.pipes.append(ours)
        yield side
    finally:
        side.close()


def _run(work: Work, pipe: Connection, environment: dict[str, str], log: str, arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    sys.stdout.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    work(Turns(pipe), *arguments)


def _family() -> list[int]:
    """Return the ids of this process and of all its descendants."""
    import psutil

    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]


def _forget_peaks() -> None:
    for pid in _family():
        Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)


def _peak_bytes() -> int:
    total = 0
    for pid in _family():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return total
