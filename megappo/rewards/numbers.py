"""Valid scores: numbers that float32 can represent. Imports only the standard library, for reward workers."""

from __future__ import annotations

import math
from typing import SupportsFloat

_LARGEST_FLOAT32 = 3.4028234663852886e38


def as_float(number: SupportsFloat) -> float:
    """Return a number as float64. The result is infinite if float64 cannot represent the number."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def score_problem(score: float) -> str:
    """Return the end of a sentence about an invalid score, or "" for a valid score."""
    if math.isfinite(score) and abs(score) <= _LARGEST_FLOAT32:
        return ""
    return f"{score}, must be finite and within float32"
