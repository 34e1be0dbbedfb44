"""Scores standardised within the samples of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo.estimators import unwhitened
from megappo.algo.groups import Groups, spread
from megappo.algo.masks import clean


@unwhitened
def grpo(*, rewards: Tensor, mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(score - mean) / (std + 1e-6) within the group, std unbiased; a group of one keeps its score.

    Shao et al. 2024, "DeepSeekMath", section 4.1.
    """
    scores_B = clean(rewards, mask).sum(-1)
    groups = Groups.of(scores_B, group_ids)
    std_B = (groups.squares_B / (groups.sizes_B - 1).clamp(min=1)).sqrt()
    return spread(torch.where(groups.sizes_B > 1, groups.deviations_B / (std_B + 1e-6), scores_B), mask)
