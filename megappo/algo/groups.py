"""Comparison of the samples of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Statistics of the scores within each prompt's group: (B,) tensors with a value for each sample."""

    deviations_B: Tensor
    """Score minus the group's mean."""
    squares_B: Tensor
    """Sum of the group's squared deviations."""
    sizes_B: Tensor

    @staticmethod
    def of(scores_B: Tensor, group_ids: Tensor) -> Groups:
        """Compute the statistics from scores and the group of each sample.

        Means are taken relative to the group's lowest score, so that equal scores deviate by exactly 0. Otherwise the
        rounding of a mean of 3.3 would be divided by a standard deviation that is rounding, too.
        """
        groups, index_B = torch.unique(group_ids, return_inverse=True)

        def sums_B(numbers_B: Tensor) -> Tensor:
            return numbers_B.new_zeros(len(groups)).index_add(0, index_B, numbers_B)[index_B]

        lowest = scores_B.new_full((len(groups),), torch.inf).scatter_reduce(0, index_B, scores_B, "amin")
        above_B, sizes_B = scores_B - lowest[index_B], sums_B(torch.ones_like(scores_B))
        deviations_B = above_B - sums_B(above_B) / sizes_B
        return Groups(deviations_B, sums_B(deviations_B.square()), sizes_B)


def spread(scores_B: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) with the sample's score at each of its tokens."""
    spread = torch.where(mask, scores_B[:, None], 0.0)
    return spread, spread
