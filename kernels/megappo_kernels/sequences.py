"""Means over the tokens of each sequence, including tokens on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megappo_kernels.autograd import ContextWith
from megappo_kernels.objectives import LOG_RATIO_LIMIT


def sequence_log_ratio(inputs: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """Return the mean of logprob - old_logprob, clamped to +-20, over the valid tokens of each token's sequence.

    Masked tokens have the result 0.

    Args:
        group: ranks with other tokens of the same sequences. All ranks must call the function, with equal sequence
            numbers.

    Raises ValueError without `sequences`.
    """
    mask = inputs["mask"]
    gap_N = (inputs["logprob"] - inputs["old_logprob"])[mask].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    sequences_N = inputs["sequences"][mask] if "sequences" in inputs else None
    if not len(gap_N):  # a placeholder token, because other ranks expect this rank in collectives
        gap_N, sequences_N = gap_N.new_zeros(1), torch.full((1,), -1, device=mask.device)
    means_N = mean_over(sequences_N, group)(gap_N)
    return torch.zeros_like(inputs["logprob"]).masked_scatter_(mask, means_N)


def mean_over(sequences_N: Tensor | None, group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """Return the function `sequence_mean`. The function uses matrix products, which always sum in the same order."""

    def mean(x_N: Tensor) -> Tensor:
        if sequences_N is None:
            raise ValueError("the policy loss needs means over sequences; pass sequence numbers as inputs.sequences")
        if group is None:
            _, index_N = torch.unique(sequences_N, return_inverse=True)
        else:  # torch.unique would renumber the sequences; 0 is the placeholder token
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
    """Sum over ranks. All ranks use the result, so its gradient is also summed over ranks."""

    @staticmethod
    def forward(ctx: ContextWith[dist.ProcessGroup | None], x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.saved = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: ContextWith[dist.ProcessGroup | None], *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.saved), None


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    x = x.clone()
    if group is not None:
        dist.all_reduce(x, group=group)
    return x
