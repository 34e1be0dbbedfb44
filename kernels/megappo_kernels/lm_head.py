"""Log-probabilities and entropies directly from hidden states, vocabulary-parallel, without (T, V) logits.

Forward processes blocks of rows and fixed slices of the vocabulary, so the result of a row does not depend on other
rows. Backward recomputes the logits slice by slice. The weight gradient of a slice is complete after one step. Only
the gradient of the hidden states is a sum over slices, in float32. The formulas are in `rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megappo_kernels.autograd import ContextWith
from megappo_kernels.backend import runs_triton
from megappo_kernels.blocks import BLOCK
from megappo_kernels.gemm import LogitsGemm, add_product
from megappo_kernels.rows import (
    Exclusion,
    RowGradients,
    Scaling,
    empty_statistics,
    logprob_and_entropy,
    merge_statistics,
)
from megappo_kernels.softmax import logits_gradient, update_statistics

# Limit on the bytes of a slice's logits and gradients in backward: 6 bytes per number (float32 and bfloat16).
_BACKWARD_BYTES = 512 * 2**20


@dataclass(frozen=True)
class HeadShard:
    """This rank's part of the vocabulary, with the options of its logits."""

    group: dist.ProcessGroup | None
    """Ranks that share the vocabulary. None: this rank has the whole vocabulary."""
    first: int
    """Token id of the first row of this rank's weight."""
    valid_rows: int
    """Rows of this rank's weight without padding."""
    scaling: Scaling
    exact: bool
    triton: bool
    exclusion: Exclusion | None = None
    """Excluded tokens of some rows. None: all rows use the whole vocabulary."""

    @staticmethod
    def of(
        hidden_TH: Tensor,
        weight_VH: Tensor,
        labels_T: Tensor,
        *,
        temperature: float | Tensor,
        tp_group: dist.ProcessGroup | None,
        valid_vocab: int | None,
        softcap: float | None,
        exact: bool,
        exclusion: Exclusion | None,
    ) -> HeadShard:
        """Return the shard for arguments of `linear_logprob`. Raises ValueError for inconsistent arguments."""
        if hidden_TH.dtype != weight_VH.dtype:
            raise ValueError(f"hidden is {hidden_TH.dtype} and weight {weight_VH.dtype}, must be one type; cast one")
        if hidden_TH.shape != (len(labels_T), weight_VH.shape[1]):
            shape = (len(labels_T), weight_VH.shape[1])
            raise ValueError(f"hidden has shape {tuple(hidden_TH.shape)}, must be {shape} by labels and weight")
        group, first, valid_rows = vocabulary_range(len(weight_VH), tp_group, valid_vocab)
        scaling = Scaling.of(temperature, softcap, len(labels_T), hidden_TH)
        excluded = None if exclusion is None else exclusion.of_labels(labels_T)
        return HeadShard(group, first, valid_rows, scaling, exact, runs_triton(hidden_TH), excluded)

    def compacted(self, rows: slice | Tensor) -> HeadShard:
        """Return the shard for some of the T rows of hidden states."""
        exclusion = None if self.exclusion is None else self.exclusion.of_rows(rows)
        return replace(self, scaling=self.scaling.of_rows(rows), exclusion=exclusion)

    def exclude_(self, logits_CW: Tensor, column: int) -> None:
        """Overwrite the logits of excluded tokens. `column`: first column of the logits, in this rank's vocabulary."""
        if self.exclusion is not None:
            self.exclusion.apply_(logits_CW, self.first + column)


def vocabulary_range(
    rows: int, group: dist.ProcessGroup | None, valid_vocab: int | None
) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return (group or None for a single rank, first token id of this rank, rows of this rank without padding)."""
    world = dist.get_world_size(group) if group is not None else 1
    rank = dist.get_rank(group) if group is not None else 0
    total = valid_vocab if valid_vocab is not None else world * rows
    if not 0 < total <= world * rows:
        raise ValueError(f"valid_vocab is {total}, must lie in 1..{world * rows}, the rows of all ranks")
    return (group if world > 1 else None), rank * rows, max(0, min(rows, total - rank * rows))


def linear_logprob(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    valid_vocab: int | None = None,
    softcap: float | None = None,
    entropy: bool = True,
    sequence_parallel: bool = False,
    exact_logits: bool = True,
    exclusion: Exclusion | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each label under softmax(cap(hidden @ weight.T) / temperature), and the
    entropies.

    Args:
        hidden_TH: rows, float32, bfloat16 or float64, the same on every rank of `tp_group`.
        weight_VH: this rank's contiguous rows of the output matrix, same dtype.
        labels_T: int64 token ids of the whole vocabulary, below `valid_vocab`.
        temperature: divisor of the logits, > 0; a number or (T,).
        tp_group: ranks that share the vocabulary, in order. None: this rank has the whole vocabulary.
        valid_vocab: size of the vocabulary without padding. Padded rows are ignored and have zero gradients.
        softcap: logits become softcap * tanh(logits / softcap) before the temperature.
        entropy: whether to compute the entropy; zeros otherwise.
        sequence_parallel: whether the caller sums the gradient of `hidden_TH` over `tp_group` (a reduce-scatter after
            a gather). Otherwise this function all-reduces the gradient in float32.
        exact_logits: whether logits of bfloat16 inputs are float32. If false, a CPU rounds the logits to bfloat16
            (error up to 2^-8 of a logit) and uses its faster bfloat16 GEMM. On CUDA, logits are always exact.
        exclusion: tokens that the distributions of some rows exclude. Rows with an excluded label do not exclude.

    Returns:
        logprob_T <= 0 and entropy_T in nats, float32 (float64 for float64 inputs), differentiable in `hidden_TH` and
        `weight_VH`.

    Raises ValueError for inconsistent shapes, types or options.
    """
    shard = HeadShard.of(
        hidden_TH,
        weight_VH,
        labels_T,
        temperature=temperature,
        tp_group=tp_group,
        valid_vocab=valid_vocab,
        softcap=softcap,
        exact=exact_logits,
        exclusion=exclusion,
    )
    return _LinearLogprob.apply(hidden_TH, weight_VH, labels_T - shard.first, shard, entropy, not sequence_parallel)


def head_statistics(
    hidden_TH: Tensor, weight_VH: Tensor, local_labels_T: Tensor, shard: HeadShard, *, entropy: bool
) -> Tensor:
    """Return (4, T) statistics of this rank's part of the vocabulary. Each block of rows reads the weight once."""
    if shard.triton:
        from megappo_kernels.gpu.head import can_fuse, launch_fused

        if shard.valid_rows and can_fuse(hidden_TH, weight_VH):
            stats_4T = launch_fused(
                hidden_TH, weight_VH[: shard.valid_rows], local_labels_T, shard.scaling, entropy=entropy
            )
            if shard.exclusion is not None:  # the fused kernel stores no logits to overwrite
                rows_N = torch.nonzero(shard.exclusion.rows_T).squeeze(1)
                some = (hidden_TH[rows_N], weight_VH, local_labels_T[rows_N], shard.compacted(rows_N))
                stats_4T[:, rows_N] = _unfused_statistics(*some, entropy=entropy)
            return stats_4T
    return _unfused_statistics(hidden_TH, weight_VH, local_labels_T, shard, entropy=entropy)


def _unfused_statistics(
    hidden_TH: Tensor, weight_VH: Tensor, local_labels_T: Tensor, shard: HeadShard, *, entropy: bool
) -> Tensor:
    """Compute `head_statistics` from stored logits, by blocks of rows and slices of columns."""
    stats_4T = empty_statistics(len(local_labels_T), hidden_TH)
    block, width = BLOCK[hidden_TH.device.type]
    width = min(width, max(1, shard.valid_rows))
    for start in range(0, len(local_labels_T), block):
        rows = slice(start, start + block)
        gemm = LogitsGemm(hidden_TH[rows], width, exact=shard.exact)
        stats_4C, labels_C, of_rows = stats_4T[:, rows], local_labels_T[rows], shard.compacted(rows)
        for first in range(0, shard.valid_rows, width):
            logits_CW = gemm(weight_VH[first : min(first + width, shard.valid_rows)])
            of_rows.exclude_(logits_CW, first)
            scaling = of_rows.scaling
            update_statistics(stats_4C, logits_CW, labels_C - first, scaling, entropy=entropy, triton=shard.triton)
    return stats_4T


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: ContextWith[tuple[HeadShard, bool, bool]],
        hidden_TH: Tensor,
        weight_VH: Tensor,
        local_labels_T: Tensor,
        shard: HeadShard,
        entropy: bool,
        reduce_hidden: bool,
    ) -> tuple[Tensor, Tensor]:
        stats_4T = head_statistics(hidden_TH, weight_VH, local_labels_T, shard, entropy=entropy)
        stats_4T = merge_statistics(stats_4T, shard.group)
        ctx.save_for_backward(hidden_TH, weight_VH, local_labels_T, stats_4T)
        ctx.saved = shard, reduce_hidden, entropy
        ctx.set_materialize_grads(False)
        return logprob_and_entropy(stats_4T, entropy=entropy)

    @staticmethod
    def backward(ctx: ContextWith[tuple[HeadShard, bool, bool]], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        shard, reduce_hidden, has_entropy = ctx.saved
        grad_logprob_T, grad_entropy_T = grads[0], grads[1] if has_entropy else None
        if grad_logprob_T is None and grad_entropy_T is None:
            return (None,) * 6
        hidden_TH, weight_VH, local_labels_T, stats_4T = ctx.saved_tensors
        gradients_T = RowGradients.of(stats_4T, grad_logprob_T, grad_entropy_T)
        # Rows without an upstream gradient are skipped, so clipped tokens cost nothing.
        counts_T = (gradients_T.logprob_C != 0) | (0 if grad_entropy_T is None else grad_entropy_T != 0)
        rows_N = torch.nonzero(counts_T).squeeze(1)
        gradients = gradients_T.of_rows(rows_N)
        grad_hidden_NH, grad_weight_VH = _recomputed_gradients(
            hidden_TH[rows_N], weight_VH, local_labels_T[rows_N], gradients, shard.compacted(rows_N)
        )
        if shard.group is not None and reduce_hidden:
            dist.all_reduce(grad_hidden_NH, group=shard.group)
        grad_hidden_TH = torch.zeros_like(hidden_TH).index_copy_(0, rows_N, grad_hidden_NH.to(hidden_TH.dtype))
        return grad_hidden_TH, grad_weight_VH, None, None, None, None


def _recomputed_gradients(
    hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, gradients: RowGradients, shard: HeadShard
) -> tuple[Tensor, Tensor]:
    """Return (gradient of the hidden rows in float32 or float64, gradient of the weight in the weight's dtype)."""
    n = len(hidden_NH)
    grad_hidden_NH = torch.zeros(hidden_NH.shape, dtype=gradients.max_C.dtype, device=hidden_NH.device)
    grad_weight_VH = torch.zeros_like(weight_VH)
    if not (n and shard.valid_rows):
        return grad_hidden_NH, grad_weight_VH
    width = min(BLOCK[hidden_NH.device.type][1], shard.valid_rows, max(256, _BACKWARD_BYTES // (6 * n) // 256 * 256))
    gemm = LogitsGemm(hidden_NH, width, exact=shard.exact)
    low = torch.empty(n * width, dtype=weight_VH.dtype, device=weight_VH.device)
    for first in range(0, shard.valid_rows, width):
        columns = slice(first, min(first + width, shard.valid_rows))
        logits_NW = gemm(weight_VH[columns])
        shard.exclude_(logits_NW, first)
        out_NW = logits_NW if low.dtype == logits_NW.dtype else low[: logits_NW.numel()].view(logits_NW.shape)
        logits_gradient(logits_NW, labels_N - first, gradients, shard.scaling, out_NW, triton=shard.triton)
        add_product(grad_hidden_NH, out_NW, weight_VH[columns])
        torch.mm(out_NW.T, hidden_NH, out=grad_weight_VH[columns])
    return grad_hidden_NH, grad_weight_VH
