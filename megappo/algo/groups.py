"""Comparison of the samples of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo_kernels.whiten import rounding_of, without_rounding


@dataclass(frozen=True)
class Groups:
    """Statistics of the scores within each prompt's group: (B,) tensors with a value for each sample.

    Computed in float64. Deviations within the rounding error are exactly 0. The mean of 0.2, 0.45, 0.45 and 0.7 is
    0.45, but the mean of the float32 values is slightly different. Scores are equal if they differ only by rounding.
    For example, the float32 sum of ten times 0.1 equals 1.
    """

    scores_B: Tensor
    deviations_B: Tensor
    """Score minus the mean of the group."""
    squares_B: Tensor
    """Sum of the squared deviations in the group."""
    sizes_B: Tensor
    """Number of samples in the group."""

    @staticmethod
    def of(parts: Tensor, group_ids: Tensor) -> Groups:
        """Compute the statistics of the groups in `group_ids` (B,).

        Args:
            parts: (B,) scores, or (B, N) parts of the scores, which are summed. Their dtype defines the rounding
                error.
        """
        parts_BN = (parts if parts.dim() == 2 else parts[:, None]).double()
        scores_B, groups_B = parts_BN.sum(-1), torch.unique(group_ids, return_inverse=True)[1]
        groups = int(groups_B.max()) + 1 if len(groups_B) else 0

        def sums_B(numbers_B: Tensor) -> Tensor:
            return numbers_B.new_zeros(groups).index_add(0, groups_B, numbers_B)[groups_B]

        def largest_B(numbers_B: Tensor) -> Tensor:
            least = numbers_B.new_full((groups,), -torch.inf)
            return least.scatter_reduce(0, groups_B, numbers_B, "amax")[groups_B]

        sizes_B, lowest_B = sums_B(torch.ones_like(scores_B)), -largest_B(-scores_B)
        # Relative to the lowest score, so that the sum of equal scores is exact.
        above_B = scores_B - lowest_B
        deviations_B = above_B - sums_B(above_B) / sizes_B
        rounding_B = rounding_of(largest_B(parts_BN.abs().sum(-1)), parts.dtype)
        std_B = (sums_B(deviations_B.square()) / sizes_B).sqrt()
        deviations_B = without_rounding(deviations_B, std_B, rounding_B)
        deviations_B = deviations_B.masked_fill(largest_B(above_B) < rounding_B, 0.0)
        return Groups(scores_B, deviations_B, sums_B(deviations_B.square()), sizes_B)

    @property
    def differ_B(self) -> Tensor:
        """bool: whether the scores in the group of the sample differ beyond the rounding error."""
        return self.squares_B != 0


def spread(scores_B: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (B, T) with the score of the sample at each of its tokens."""
    spread = torch.where(mask, scores_B[:, None], 0.0)
    return spread, spread
