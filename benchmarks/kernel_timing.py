"""Timing, memory measurement and tables of the kernel benchmark."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_peers import Peer

MIB = 2**20


@dataclass
class Provider:
    """Timed function: `prepare(round)` returns the call, so that its preparation is not timed."""

    name: str
    prepare: Callable[[int], Callable[[], Any]]
    error: Callable[[], str] | None = None
    is_floor: bool = False
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    failure: str | None = None


class Machine:
    """Clock, memory and inputs of one device."""

    def __init__(self, device: str, repeat: int) -> None:
        self.device, self.repeat, self.is_cuda = torch.device(device), repeat, device == "cuda"
        self._flush = torch.empty(256 * MIB // 4 if self.is_cuda else 0, device=self.device)

    def time(self, providers: list[Provider]) -> None:
        """Run two warm-up rounds, then `repeat` rounds. The providers alternate in each round."""
        for round_number in range(-2, self.repeat):
            for provider in providers:
                if provider.failure is not None:
                    continue
                try:
                    call = provider.prepare(round_number)
                    seconds, peak = self._measure(call)
                except Exception as error:  # noqa: BLE001 - a failure of one peer must not stop the others
                    provider.failure = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                    continue
                if round_number >= 0:
                    provider.seconds.append(seconds)
                    provider.peak_bytes = max(provider.peak_bytes, peak)

    def _measure(self, call: Callable[[], Any]) -> tuple[float, int]:
        if not self.is_cuda:
            with peak_memory() as peak:
                seconds = self.seconds(call)
            return seconds, peak[0]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds = self.seconds(call)
        return seconds, torch.cuda.max_memory_allocated() - before

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds of a call. On CUDA, the L2 cache is flushed before, and two events measure the time."""
        if not self.is_cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        self._flush.zero_()
        torch.cuda.synchronize()
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        call()
        end_event.record()
        torch.cuda.synchronize()
        return start_event.elapsed_time(end_event) / 1e3


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Measure the growth of this process's peak resident memory in bytes, as reported by Linux."""
    peak = [0]
    try:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)  # memory that was freed earlier would reduce the growth
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        yield peak
        peak[0] = max(0, _status("VmHWM") - before)
    except FileNotFoundError:  # not Linux
        yield peak


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


def rows_of(providers: list[Provider]) -> list[list[str]]:
    """Return rows with name, ms, percentiles, time relative to the floor, peak MiB and error."""
    floors = [p for p in providers if p.is_floor]
    assert len(floors) == 1 and floors[0].failure is None, floors
    floor = statistics.median(floors[0].seconds)
    rows = []
    for p in providers:
        if p.failure is not None:
            rows.append([p.name, p.failure, "", "", "", ""])
            continue
        ordered = sorted(p.seconds)
        low, high = (ordered[round(q * (len(ordered) - 1))] * 1e3 for q in (0.2, 0.8))
        median = statistics.median(ordered)
        error = p.error() if p.error is not None else ""
        memory = f"{p.peak_bytes / MIB:.1f}"
        rows.append([p.name, f"{median * 1e3:.3g}", f"{low:.3g}-{high:.3g}", f"{median / floor:.2f}", memory, error])
    return rows


HEADINGS = ["provider", "ms", "p20-p80", "x floor", "peak MiB", "error"]


def markdown(title: str, rows: list[list[str]], peers: list[Peer]) -> str:
    """Return a table in Markdown, with the peers that were not run."""
    lines = [f"## {title}", "", "| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", *(f"- not run: {p.name} {p.version}: {p.why_not}" for p in peers if p.run is None), ""]
    return "\n".join(lines)
