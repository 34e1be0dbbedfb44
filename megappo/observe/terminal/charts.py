"""Charts made of text characters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
"""Characters of rising height."""
ASCII_BLOCKS = "_.-=*#"
"""Characters of rising height for a terminal without Unicode."""


def sparkline(values: Iterable[float], width: int, *, blocks: str = BLOCKS) -> str:
    """Return the last `width` finite values as characters of rising height. Return "" if no value is finite."""
    finite = [value for value in values if math.isfinite(value)]
    shown = finite[max(0, len(finite) - width) :]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    return "".join(blocks[_level(value, low, high, len(blocks))] for value in shown)


def mean(values: Sequence[float]) -> float:
    """Return the mean of values. The mean of finite values is finite even if the sum overflows."""
    average = sum(value / len(values) for value in values)
    return min(max(average, min(values)), max(values))


def curve(
    values: Sequence[float],
    width: int = 60,
    height: int = 10,
    *,
    ends: tuple[int, int] | None = None,
    combine: Callable[[Sequence[float]], float] = mean,
) -> str:
    """Return a chart of several lines: the vertical axis shows values, the horizontal axis shows positions.

    If the number of values exceeds `width`, each column shows one number for a range of values. Values that are not
    finite leave a gap.

    Args:
        values: ordered values, for example one per step.
        width: maximum number of columns without labels; at least 1.
        height: number of rows without the axis; at least 1.
        combine: function that reduces the finite values of a column to one number.
        ends: labels of the first and the last value, such as steps. Default: positions, starting at 1.
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
    """Return the level of a value: 0 for `low` to `levels` - 1 for `high`. Return 0 if `low` equals `high`."""
    span = high / 2 - low / 2  # halves, because the difference may overflow a float
    return round((value / 2 - low / 2) / span * (levels - 1)) if span > 0 else 0


def _columns(values: Sequence[float], columns: int, combine: Callable[[Sequence[float]], float]) -> list[float | None]:
    numbers: list[float | None] = []
    for column in range(columns):
        share = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        finite = [value for value in share if math.isfinite(value)]
        numbers.append(combine(finite) if finite else None)
    return numbers
