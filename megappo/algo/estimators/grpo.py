"""Scores standardised within the samples of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megappo.algo.estimators import unwhitened

if TYPE_CHECKING:
    from torch import Tensor


@unwhitened
def grpo(*, rewards: Tensor, mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (score - mean) / (std + 1e-6) within the group, with unbiased std. A group of one sample keeps its
    score.

    Shao et al. 2024, "DeepSeekMath", section 4.1.
    """
    from megappo.algo.groups import Groups, spread
    from megappo.algo.masks import clean

    groups = Groups.of(clean(rewards, mask), group_ids)
    std_B = (groups.squares_B / (groups.sizes_B - 1).clamp(min=1)).sqrt()
    advantages_B = groups.scores_B.where(groups.sizes_B <= 1, groups.deviations_B / (std_B + 1e-6))
    return spread(advantages_B.to(rewards.dtype), mask)
