"""Dr. GRPO's advantages as an estimator of your own (Liu et al. 2025, "Understanding R1-Zero-Like Training").

algorithm:
  estimator: tests.examples.dr_grpo:dr_grpo
  loss_aggregation: seq-mean-token-sum-norm
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo.estimators import unwhitened


@unwhitened
def dr_grpo(*, rewards: Tensor, mask: Tensor, group_ids: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scores (B,) minus the mean of their prompt, not divided by its spread, at every token (B, T)."""
    scores = rewards.masked_fill(~mask, 0.0).sum(-1)
    same = (group_ids[:, None] == group_ids).to(scores.dtype)
    advantages = torch.where(mask, scale * (scores - same @ scores / same.sum(1))[:, None], 0.0)
    return advantages, advantages
