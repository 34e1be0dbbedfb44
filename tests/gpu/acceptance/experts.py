"""Grouped experts compared with the sequential experts of Megatron."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.experts import Shape, measure_all
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, measured, within

DIFFERENCES = {"float32": 1e-6, "bfloat16": 1e-2}
"""Bound of the largest difference of outputs, divided by the largest output."""


def against_sequential(place: Place) -> Iterator[Row]:
    """Yield outputs and seconds of the experts and of their complete layer."""
    shapes = [Shape(32, 16, "float32", 8, 2, 64)] if place.tiny else [Shape(2048, 768, "bfloat16", 128, 8, 8192)]
    rows, _ = measure_all(shapes, place.device, 1 if place.tiny else 20, 1 if place.tiny else None)
    for row in rows:
        name = f"{row.what}, {row.shape.hidden} x {row.shape.ffn} {row.shape.dtype}"
        yield within(name, {"differ by": row.difference}, DIFFERENCES[row.shape.dtype])
        yield measured(
            f"{name}: time",
            f"{1e3 * row.grouped_seconds:.3g} ms, sequential {1e3 * row.megatron_seconds:.3g} ms: "
            f"{row.speedup:.2f} times as fast",
            seconds=row.grouped_seconds,
            sequential_seconds=row.megatron_seconds,
        )
