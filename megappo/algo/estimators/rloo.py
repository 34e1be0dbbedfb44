"""Scores relative to the mean of the other samples of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megappo.algo.estimators import unwhitened

if TYPE_CHECKING:
    from torch import Tensor


@unwhitened
def rloo(*, rewards: Tensor, mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the score minus the mean of the other samples in the group. A group of one sample keeps its score.

    Ahmadian et al. 2024, "Back to Basics", eq. 3.
    """
    from megappo.algo.groups import Groups, spread
    from megappo.algo.masks import clean

    groups = Groups.of(clean(rewards, mask), group_ids)
    # The mean of the other n - 1 samples is n / (n - 1) times as far from a score as the mean of the group.
    others_B = groups.deviations_B * groups.sizes_B / (groups.sizes_B - 1).clamp(min=1)
    advantages_B = groups.scores_B.where(groups.sizes_B <= 1, others_B)
    return spread(advantages_B.to(rewards.dtype), mask)
