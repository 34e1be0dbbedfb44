"""Means over the tokens of each sequence, which ranks may share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megappo_kernels.autograd import ContextWith
from megappo_kernels.objectives import LOG_RATIO_LIMIT


def sequence_log_ratio(given: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """Mean of logprob - old_logprob, each within +-20, over the valid tokens of a token's sequence; 0 where masked.

    `group`: ranks that have other tokens of the same sequences, numbered alike; all of them call this. Raises
    ValueError without `sequences`.
    """
    mask = given["mask"]
    gap_N = (given["logprob"] - given["old_logprob"])[mask].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    sequences_N = given["sequences"][mask] if "sequences" in given else None
    if not len(gap_N):  # it takes part in the collectives of other ranks
        gap_N, sequences_N = gap_N.new_zeros(1), torch.full((1,), -1, device=mask.device)
    means_N = mean_over(sequences_N, group)(gap_N)
    return torch.zeros_like(given["logprob"]).masked_scatter_(mask, means_N)


def mean_over(sequences_N: Tensor | None, group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """The function `sequence_mean`. It uses matrix products, whose sums always have the same order."""

    def mean(x_N: Tensor) -> Tensor:
        if sequences_N is None:
            raise ValueError("the policy loss wants means over sequences; say which tokens are whose: inputs.sequences")
        if group is None:
            _, index_N = torch.unique(sequences_N, return_inverse=True)
        else:  # unique to the placeholder token, as other ranks have tokens of sequence 0
            index_N = sequences_N + 1
        member_NS = torch.nn.functional.one_hot(index_N, _largest(index_N, group) + 1).to(x_N.dtype)
        sums_S: Tensor = _SumOver.apply(x_N @ member_NS, group)
        counts_S: Tensor = _SumOver.apply(member_NS.sum(0), group)
        return member_NS @ (sums_S / counts_S.clamp(min=1))

    return mean


def _largest(index_N: Tensor, group: dist.ProcessGroup | None) -> int:
    largest = index_N.amax()
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return int(largest)


class _SumOver(torch.autograd.Function):
    """Sum over ranks, which each of them uses; its gradient is summed likewise."""

    @staticmethod
    def forward(ctx: ContextWith[dist.ProcessGroup | None], x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.kept = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: ContextWith[dist.ProcessGroup | None], *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.kept), None


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    x = x.clone()
    if group is not None:
        dist.all_reduce(x, group=group)
    return x
