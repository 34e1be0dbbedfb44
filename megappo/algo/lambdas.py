"""GAE's lambda as a function of the response's length."""

from __future__ import annotations

from torch import Tensor


def length_adaptive(*, mask: Tensor, alpha: float) -> Tensor:
    """(B,) float64: 1 - 1 / (alpha * length), at least 0, so that the score reaches the first token of responses of any
    length about alike.

    Args:
        mask: (B, T) bool; a sample's length is its number of True positions, as GAE skips the others.
        alpha: the larger, the nearer lambda is to 1.

    Yue et al. 2025, "VAPO", section 4.2.
    """
    return (1 - 1 / (alpha * mask.sum(-1).double().clamp(min=1))).clamp(min=0.0)
