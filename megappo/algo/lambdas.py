"""GAE's lambda as a function of the response's length."""

from __future__ import annotations

from torch import Tensor


def length_adaptive(*, mask: Tensor, alpha: float) -> Tensor:
    """(B,) float64: 1 - 1 / (alpha * length), at least 0. For long responses a share of exp(-1 / alpha) of the score
    reaches the first token, whatever the length.

    Args:
        mask: (B, T) bool; a sample's length is its number of True positions, as GAE skips the others.
        alpha: a larger alpha gives a lambda closer to 1. VAPO has 0.05, SAO and CompactionRL have 1.5.

    Yue et al. 2025, "VAPO", section 4.2; Hou et al. 2026, "SAO", arXiv:2607.07508.
    """
    return (1 - 1 / (alpha * mask.sum(-1).double().clamp(min=1))).clamp(min=0.0)
