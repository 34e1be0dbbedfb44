"""CPU of this machine, with rates that are measured for one or two seconds instead of taken from a data sheet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from megappo.plan.hardware.machines import Machine
from megappo.runtime.memory.memory_limits import machine_bytes

LOCAL = "here"
"""Name of the measured machine in `--machine`."""
_ROWS, _INNER, _COLUMNS = 512, 768, 2048
"""Shape of the timed matrix product, which multiplies a microbatch with a matrix of a small model."""
_COPY_BYTES = 128 << 20
_ROUNDS = 25


def measure_cpu() -> Machine:
    """Return a machine with the rates that all cores reach together: products in bfloat16 and float32, and a copy."""
    import torch

    cores, total = len(os.sched_getaffinity(0)), machine_bytes()
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.ones(_ROWS, _INNER, dtype=dtype), torch.ones(_COLUMNS, _INNER, dtype=dtype)
        seconds = _fastest(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight))  # type: ignore[misc]
        rates[dtype] = 2.0 * _ROWS * _INNER * _COLUMNS / seconds
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = 2.0 * _COPY_BYTES / _fastest(lambda: target.copy_(source))
    torch.set_num_threads(threads)
    return Machine(
        LOCAL,
        f"this machine, measured: {cores} cores, {rates[torch.bfloat16] / 1e12:.2f} TFLOP/s in bfloat16, "
        f"{rates[torch.float32] / 1e12:.2f} in float32, {copied / 1e9:.0f} GB/s, {total / 1e9:.0f} GB",
        rates[torch.bfloat16],
        rates[torch.float32],
        total,
        copied,
        copied,
        copied,
        1,
        is_cuda=False,
        shared_by_ranks=True,
        host_bandwidth=copied / 2,
        is_measured=True,
    )


def _fastest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls. Other processes on the same cores slow the other
    calls down."""
    work()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
