"""Penalty of overlong responses."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths_B: Tensor, *, most_tokens: int, buffer_tokens: int) -> Tensor:
    """Return (B,) float32 from 0 to -1. The penalty is 0 up to `most_tokens` - `buffer_tokens`, then linear down to
    -1 at `most_tokens`.

    Yu et al. 2025, "DAPO", eq. 13 (soft overlong punishment).
    """
    over_B = (lengths_B - (most_tokens - buffer_tokens)).float()
    return -(over_B / buffer_tokens).clamp(0.0, 1.0)
