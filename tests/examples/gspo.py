"""GSPO as a custom policy loss (Zheng et al. 2025, "Group Sequence Policy Optimization", eq. 5 and 7).

algorithm:
  policy_loss: tests.examples.gspo:gspo
  policy_loss_options: {low: 3.0e-4, high: 4.0e-4}
  loss_aggregation: seq-mean-token-mean
"""

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
    """Compute PPO-clip with the geometric mean of the ratios of a sequence. The parameter `sequence_mean` marks a
    loss whose gradients need whole sequences.

    All tensors are (N,), one number per token in the loss. Each token has the ratio of its sequence.
    """
    ratio = sequence_mean(log_ratio).exp()
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(-advantages * ratio, clipped)
    return loss, {"clipfrac": clipped > -advantages * ratio, "sequence_ratio": ratio}
