"""Log-probabilities and entropies straight from hidden states, vocabulary-parallel, without the (T, V) logits.

Shape legend: T rows (tokens), H hidden size, V vocabulary rows on this rank, C rows of a chunk.

Per row and rank, with z the scaled logits: m = max z, s = sum e^(z-m), u = sum e^(z-m) (z-m), t = the label's z where
it lives here. One all-gather of (m, s, u, t) gives M, S, U over the whole vocabulary, and

    logprob = t - M - log S            entropy = log S - U/S
    dz_j    = [g_l (1[j=y] - p_j) - g_H p_j (z_j - M - U/S)] / temperature,   p_j = e^(z_j-M) / S

The shifted form of the entropy has no cancellation. Backward recomputes the logits of a chunk at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_BYTES = 256 * 2**20
"""Most bytes of float32 logits alive at once."""


def linear_logprob(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    valid_vocab: int | None = None,
    entropy: bool = True,
    sequence_parallel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Natural log-probability of each label under softmax(hidden @ weight.T / temperature), and the row's entropy.

    Args:
        hidden_TH: rows, float32 or bfloat16, the same on every rank of `tp_group`.
        weight_VH: this rank's contiguous rows of the output matrix, same dtype.
        labels_T: int64 token ids of the whole vocabulary, below `valid_vocab`.
        temperature: divides the logits, > 0.
        tp_group: ranks that share the vocabulary, in order; None: all of it is here.
        valid_vocab: size of the vocabulary without padding; logits of padded rows count as -inf.
        entropy: whether to compute the entropy; zeros otherwise.
        sequence_parallel: whether the caller sums the gradient of `hidden_TH` over `tp_group` itself (a
            reduce-scatter behind a gather); otherwise it is all-reduced here.

    Returns:
        logprob_T and entropy_T in nats, float32 (float64 for float64 inputs), logprob <= 0.
    """
    world = dist.get_world_size(tp_group) if tp_group is not None else 1
    rank = dist.get_rank(tp_group) if tp_group is not None else 0
    first = rank * weight_VH.shape[0]
    total = valid_vocab if valid_vocab is not None else world * weight_VH.shape[0]
    here = max(0, min(weight_VH.shape[0], total - first))
    group = tp_group if world > 1 else None
    return _LinearLogprob.apply(
        hidden_TH, weight_VH, labels_T - first, temperature, group, here, entropy, sequence_parallel
    )


def _row_chunks(rows: int, vocab: int) -> list[slice]:
    size = max(1, _CHUNK_BYTES // (4 * max(1, vocab)))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """Scaled logits in float32; on CUDA from the GEMM's float32 accumulators, without rounding to bfloat16."""
    if hidden_CH.dtype != torch.bfloat16:
        logits_CV = hidden_CH @ weight_VH.T
    elif hidden_CH.is_cuda:
        logits_CV = torch.mm(hidden_CH, weight_VH.T, out_dtype=torch.float32)
    else:
        logits_CV = (hidden_CH @ weight_VH.T).float()
    return logits_CV.div_(temperature) if temperature != 1.0 else logits_CV


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        local_labels_T: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        here: int,
        entropy: bool,
        sequence_parallel: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden_TH.dtype == torch.float64 else torch.float32
        rows = len(local_labels_T)
        # m, s, u, t per row; a rank without valid rows contributes the neutral element.
        stats_4T = torch.zeros(4, rows, dtype=dtype, device=hidden_TH.device)
        stats_4T[0] = stats_4T[3] = -torch.inf
        if here:
            for chunk in _row_chunks(rows, here):
                logits_CV = _logits(hidden_TH[chunk], weight_VH[:here], temperature)
                stats_4T[:, chunk] = _row_statistics(logits_CV, local_labels_T[chunk], entropy)
        max_T, sum_T, weighted_T, target_T = _combine(stats_4T, group)
        ctx.save_for_backward(hidden_TH, weight_VH, local_labels_T, max_T, sum_T, weighted_T)
        ctx.temperature, ctx.group, ctx.here = temperature, group, here
        ctx.sequence_parallel = sequence_parallel
        ctx.set_materialize_grads(False)
        logprob_T = (target_T - max_T - sum_T.log()).clamp_(max=0.0)
        entropy_T = sum_T.log() - weighted_T / sum_T if entropy else torch.zeros_like(sum_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprob_T, grad_entropy_T = grads
        if grad_logprob_T is None and grad_entropy_T is None:
            return (None,) * 8
        hidden_TH, weight_VH, local_labels_T, max_T, sum_T, weighted_T = ctx.saved_tensors
        accumulate = torch.float64 if hidden_TH.dtype == torch.float64 else torch.float32
        grad_hidden_TH = torch.zeros_like(hidden_TH)
        grad_weight_VH = torch.zeros(weight_VH.shape, dtype=accumulate, device=weight_VH.device)
        weight_here = weight_VH[: ctx.here]
        for chunk in _row_chunks(len(local_labels_T), ctx.here) if ctx.here else ():
            shifted_CV = _logits(hidden_TH[chunk], weight_here, ctx.temperature).sub_(max_T[chunk, None])
            grad_CV = _logits_gradient(
                shifted_CV,
                local_labels_T[chunk],
                sum_T[chunk],
                weighted_T[chunk],
                None if grad_logprob_T is None else grad_logprob_T[chunk],
                None if grad_entropy_T is None else grad_entropy_T[chunk],
            ).div_(ctx.temperature)
            grad_CV = grad_CV.to(weight_VH.dtype)
            grad_hidden_TH[chunk] = grad_CV @ weight_here
            grad_weight_VH[: ctx.here] += grad_CV.T @ hidden_TH[chunk]
        if ctx.group is not None and not ctx.sequence_parallel:
            dist.all_reduce(grad_hidden_TH, group=ctx.group)
        return grad_hidden_TH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None, None, None


def _row_statistics(logits_CV: Tensor, labels_C: Tensor, entropy: bool) -> Tensor:
    """(4, C): m, s, u, t of the module's docstring; destroys the logits."""
    max_C = logits_CV.amax(-1)
    elsewhere_C = (labels_C < 0) | (labels_C >= logits_CV.shape[1])
    target_C = logits_CV.gather(1, labels_C.masked_fill(elsewhere_C, 0)[:, None]).squeeze(1)
    target_C = target_C.masked_fill(elsewhere_C, -torch.inf)
    shifted_CV = logits_CV.sub_(max_C[:, None])
    if not entropy:
        return torch.stack([max_C, shifted_CV.exp_().sum(-1), torch.zeros_like(max_C), target_C])
    exp_CV = shifted_CV.exp()
    return torch.stack([max_C, exp_CV.sum(-1), exp_CV.mul_(shifted_CV).sum(-1), target_C])


def _combine(stats_4T: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(M, S, U, t) over the whole vocabulary, by one all-gather; the order of ranks fixes the order of sums."""
    if group is None:
        max_T, sum_T, weighted_T, target_T = stats_4T.unbind(0)
        return max_T, sum_T, weighted_T, target_T
    gathered = [torch.empty_like(stats_4T) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, stats_4T, group=group)
    stats_R4T = torch.stack(gathered)
    max_T = stats_R4T[:, 0].amax(0)
    shift_RT = stats_R4T[:, 0] - max_T
    scale_RT = shift_RT.exp()
    # A rank without valid vocabulary has m = -inf, s = u = 0: its products must be 0, not NaN.
    shift_RT = shift_RT.masked_fill(torch.isinf(shift_RT), 0.0)
    sum_T = (scale_RT * stats_R4T[:, 1]).sum(0)
    weighted_T = (scale_RT * (stats_R4T[:, 2] + shift_RT * stats_R4T[:, 1])).sum(0)
    return max_T, sum_T, weighted_T, stats_R4T[:, 3].amax(0)


def _logits_gradient(
    shifted_CV: Tensor,
    labels_C: Tensor,
    sum_C: Tensor,
    weighted_C: Tensor,
    grad_logprob_C: Tensor | None,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """Gradient of the scaled logits from z - M; destroys its input."""
    prob_CV = shifted_CV.exp().div_(sum_C[:, None])
    if grad_entropy_C is None:
        grad_CV = prob_CV
        assert grad_logprob_C is not None
        grad_CV.mul_(-grad_logprob_C[:, None])
    else:
        # p * -(g_l + g_H (z - M - U/S))
        factor_CV = shifted_CV.sub_((weighted_C / sum_C)[:, None]).mul_(grad_entropy_C[:, None])
        if grad_logprob_C is not None:
            factor_CV.add_(grad_logprob_C[:, None])
        grad_CV = prob_CV.mul_(factor_CV).neg_()
    if grad_logprob_C is not None:
        here_C = (labels_C >= 0) & (labels_C < grad_CV.shape[1])
        column_C = labels_C.masked_fill(~here_C, 0)[:, None]
        grad_CV.scatter_add_(1, column_C, torch.where(here_C, grad_logprob_C, 0.0)[:, None].to(grad_CV.dtype))
    return grad_CV
