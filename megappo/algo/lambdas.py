"""Lambda of GAE as a function of the length of the response."""

from __future__ import annotations

from torch import Tensor


def length_adaptive(*, mask: Tensor, alpha: float) -> Tensor:
    """Return (B,) float64 lambdas: 1 - 1 / (alpha * length), at least 0. For long responses a share of exp(-1 /
    alpha) of the score reaches the first token, regardless of the length.

    Args:
        mask: (B, T) bool. The length of a sample is its number of True positions, because GAE skips other positions.
        alpha: A larger alpha gives a lambda closer to 1. VAPO uses 0.05, SAO and CompactionRL use 1.5.

    Yue et al. 2025, "VAPO", section 4.2; Hou et al. 2026, "SAO", arXiv:2607.07508.
    """
    return (1 - 1 / (alpha * mask.sum(-1).double().clamp(min=1))).clamp(min=0.0)
