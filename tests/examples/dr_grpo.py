"""Advantages of Dr. GRPO as a custom estimator (Liu et al. 2025, "Understanding R1-Zero-Like Training").

algorithm:
  estimator: tests.examples.dr_grpo:dr_grpo
  loss_aggregation: seq-mean-token-sum-norm
"""

from __future__ import annotations

from torch import Tensor

from megappo.algo.estimators import unwhitened
from megappo.algo.groups import Groups, spread


@unwhitened
def dr_grpo(*, rewards: Tensor, mask: Tensor, group_ids: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the scores (B,) minus the mean of their prompt, without division by the spread, at every token (B, T).
    Deviations within the rounding error are 0."""
    deviations_B = Groups.of(rewards.masked_fill(~mask, 0.0), group_ids).deviations_B
    return spread((scale * deviations_B).to(rewards.dtype), mask)
