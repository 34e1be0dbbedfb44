"""Charts made of text characters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
"""Characters of rising height."""
ASCII_BLOCKS = "_.-=*#"
"""Characters of rising height for a terminal without Unicode."""


def sparkline(values: Iterable[float], width: int, *, blocks: str = BLOCKS) -> str:
    """The last `width` finite values as characters of rising height; "" where there is none."""
    finite = [value for value in values if math.isfinite(value)]
    shown = finite[max(0, len(finite) - width) :]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    return "".join(blocks[_level(value, low, high, len(blocks))] for value in shown)


def mean(values: Sequence[float]) -> float:
    """The mean, which is finite even where the sum of finite values is not."""
    found = sum(value / len(values) for value in values)
    return min(max(found, min(values)), max(values))


def curve(
    values: Sequence[float],
    width: int = 60,
    height: int = 10,
    *,
    ends: tuple[int, int] | None = None,
    combine: Callable[[Sequence[float]], float] = mean,
) -> str:
    """A chart of several lines: values upwards, their positions to the right.

    If the number of values exceeds `width`, each column shows one number for a range of values. Values that are not
    finite leave a gap.

    Args:
        values: in order, for instance one per step.
        width: most columns of the chart, labels not counted; at least 1.
        height: rows of the chart, axis not counted; at least 1.
        combine: makes one number of the finite values of a column.
        ends: labels under the first and the last value, such as their steps; default: positions, from 1.
    """
    assert width >= 1 and height >= 1, f"a chart of {width} x {height} characters"
    columns = _columns(values, min(width, len(values)), combine)
    finite = [value for value in columns if value is not None]
    if not finite:
        return "(nothing to show)"
    low, high = min(finite), max(finite)
    rows = [[" "] * len(columns) for _ in range(height)]
    for x, value in enumerate(columns):
        if value is not None:
            rows[height - 1 - _level(value, low, high, height)][x] = "*"
    labels = {height - 1: f"{low:.4g}"}
    if high > low:
        labels[0] = f"{high:.4g}"
    if high > low and height >= 3:
        middle = height // 2
        share = (height - 1 - middle) / (height - 1)
        labels[middle] = f"{low * (1 - share) + high * share:.4g}"
    gutter = max(len(label) for label in labels.values())
    lines = [f"{labels.get(y, ''):>{gutter}} |{''.join(row)}".rstrip() for y, row in enumerate(rows)]
    first, last = ends or (1, len(values))
    room = len(columns) - len(str(first))
    end = f"{last:>{max(room, len(str(last)) + 1)}}" if len(columns) > 1 else ""
    axis = [f"{'':{gutter}} +{'-' * len(columns)}", f"{'':{gutter}}  {first}{end}"]
    return "\n".join(lines + axis)


def _level(value: float, low: float, high: float, levels: int) -> int:
    """0 for `low` to `levels` - 1 for `high`; 0 where they are equal."""
    span = high / 2 - low / 2  # halves, as the whole may overflow a float
    return round((value / 2 - low / 2) / span * (levels - 1)) if span > 0 else 0


def _columns(values: Sequence[float], columns: int, combine: Callable[[Sequence[float]], float]) -> list[float | None]:
    found: list[float | None] = []
    for column in range(columns):
        share = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        finite = [value for value in share if math.isfinite(value)]
        found.append(combine(finite) if finite else None)
    return found
