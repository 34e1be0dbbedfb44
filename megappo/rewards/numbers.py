"""What counts as a score: a number that float32 can hold. Standard library only, as reward workers import it."""

from __future__ import annotations

import math
from typing import SupportsFloat

_LARGEST_FLOAT32 = 3.4028234663852886e38


def as_float(number: SupportsFloat) -> float:
    """A number as float64, infinite where it has more digits than that can hold."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def score_problem(score: float) -> str:
    """Why a number is no score, for the end of a sentence; "" for one that is."""
    if math.isfinite(score) and abs(score) <= _LARGEST_FLOAT32:
        return ""
    return f"{score}, must be finite and within float32"
