"""Samples of one prompt compared with each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Scores of the samples of each prompt: (B,) tensors, of a sample and its group."""

    deviations_B: Tensor
    """Score minus the group's mean."""
    squares_B: Tensor
    """Sum of the group's squared deviations."""
    sizes_B: Tensor

    @staticmethod
    def of(scores_B: Tensor, group_ids: Tensor) -> Groups:
        """Means are taken above the group's lowest score, so that equal scores deviate by exactly 0: what rounding
        leaves of a mean of 3.3 would be divided by a standard deviation that is rounding too."""
        groups, index_B = torch.unique(group_ids, return_inverse=True)

        def sums_B(numbers_B: Tensor) -> Tensor:
            return numbers_B.new_zeros(len(groups)).index_add(0, index_B, numbers_B)[index_B]

        lowest = scores_B.new_full((len(groups),), torch.inf).scatter_reduce(0, index_B, scores_B, "amin")
        above_B, sizes_B = scores_B - lowest[index_B], sums_B(torch.ones_like(scores_B))
        deviations_B = above_B - sums_B(above_B) / sizes_B
        return Groups(deviations_B, sums_B(deviations_B.square()), sizes_B)


def spread(scores_B: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same advantage at every token of a sample."""
    spread = torch.where(mask, scores_B[:, None], 0.0)
    return spread, spread
