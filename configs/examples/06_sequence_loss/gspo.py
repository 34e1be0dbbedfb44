"""The policy loss of GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization", eq. 5 and 7)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gspo(
    *,
    log_ratio: Tensor,
    advantages: Tensor,
    sequence_mean: Callable[[Tensor], Tensor],
    low: float = 3e-4,
    high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped loss and the metrics of each token, (N,).

    The ratio is the geometric mean of the ratios of a sequence. A function with the argument `sequence_mean` receives
    the tokens of whole sequences.
    """
    ratio = sequence_mean(log_ratio).exp()
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(-advantages * ratio, clipped)
    return loss, {"clipfrac": clipped > -advantages * ratio, "sequence_ratio": ratio}
