"""GAE's lambda of long answers."""

from __future__ import annotations

from torch import Tensor


def length_adaptive(*, mask: Tensor, alpha: float) -> Tensor:
    """(B,) float64: 1 - 1 / (alpha * length), never below 0, so that the score reaches the first token of an answer of
    any length about alike.

    Args:
        mask: (B, T) bool; a sample's length is what is True of it, as GAE passes over the rest.
        alpha: the larger, the nearer to 1.

    Yue et al. 2025, "VAPO", section 4.2.
    """
    return (1 - 1 / (alpha * mask.sum(-1).double().clamp(min=1))).clamp(min=0.0)
