"""Versions, memory, and the two rates for the floors."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.kernel_timing import Machine
from megappo.observe.timing.throughput import peak_flops
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, measured, skipped

_PACKAGES = (
    "torch", "triton", "megatron-core", "transformers", "sglang", "transformer-engine", "apex", "liger-kernel",
    "cut-cross-entropy", "verl",
)  # fmt: skip


def describe(place: Place) -> Iterator[Row]:
    """Describe this machine."""
    for name in _PACKAGES:
        try:
            yield measured(name, version(name))
        except PackageNotFoundError:
            yield skipped(name, "not installed")
    if place.device == "cpu":
        yield measured("device", f"CPU, {len(os.sched_getaffinity(0))} cores", threads=torch.get_num_threads())
    else:
        yield from _gpu()
    yield from _rates(place)


def _gpu() -> Iterator[Row]:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    text = f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs"
    yield measured("device", f"{text}, CUDA {torch.version.cuda}", multiprocessors=properties.multi_processor_count)
    yield measured("memory", f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free", free_bytes=free, total_bytes=total)
    yield measured("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def _rates(place: Place) -> Iterator[Row]:
    flops, n_bytes = matrix_rate(place), copy_rate(place)
    peak = peak_flops(torch.cuda.get_device_name()) if place.device == "cuda" else None
    share = "" if peak is None else f", {flops / peak:.0%} of the data sheet"
    yield measured("matrix rate", f"{flops / 1e12:.3g} TFLOP/s in bfloat16{share}", flops_per_second=flops)
    yield measured("copy rate", f"{n_bytes / 1e9:.3g} GB/s, read and written", bytes_per_second=n_bytes)


def matrix_rate(place: Place) -> float:
    """Return the FLOP/s of a large bfloat16 product of random numbers."""
    n = 256 if place.tiny else 8192
    a, b = (torch.randn(n, n, device=place.device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / median_seconds(place, lambda: torch.mm(a, b, out=out))


def copy_rate(place: Place) -> float:
    """Return the bytes per second of a large copy on the device. Bytes are counted for reads and writes."""
    source = torch.ones(2**20 if place.tiny else 2**31, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(place, lambda: target.copy_(source))


def median_seconds(place: Place, call: Callable[[], Any], repeat: int = 10) -> float:
    """Return the median seconds of a call, after two warm-up calls."""
    clock = Machine(place.device, 0)
    seconds = [clock.seconds(call) for _ in range(repeat + 2)]
    return statistics.median(seconds[2:])
