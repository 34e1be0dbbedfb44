"""Log-probabilities and entropies from existing vocabulary-parallel logits.

Forward reads the logits once. Backward overwrites the logits with their gradient, so a training step stores only one
copy.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megappo_kernels.autograd import ContextWith
from megappo_kernels.backend import runs_triton
from megappo_kernels.lm_head import HeadShard, vocabulary_range
from megappo_kernels.rows import RowGradients, Scaling, empty_statistics, logprob_and_entropy, merge_statistics
from megappo_kernels.softmax import logits_gradient, update_statistics

# float32 bytes of the rows that a CPU processes at a time. Each of two scratch buffers has this size.
_CPU_BLOCK_BYTES = 4 * 2**20


def logits_logprob(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    valid_vocab: int | None = None,
    softcap: float | None = None,
    entropy: bool = True,
    inplace_backward: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each label under softmax(cap(logits) / temperature), and the entropy of each
    row.

    Args:
        logits_TV: this rank's columns of the logits, float32, bfloat16, float16 or float64. Forward does not change
            the logits.
        labels_T: int64 token ids of the whole vocabulary, below `valid_vocab`.
        temperature: divisor of the logits, > 0; a number or (T,).
        tp_group: ranks that share the vocabulary, in order. None: this rank has the whole vocabulary.
        valid_vocab: size of the vocabulary without padding. Padded columns are ignored.
        softcap: logits become softcap * tanh(logits / softcap) before the temperature.
        entropy: whether to compute the entropy; zeros otherwise.
        inplace_backward: whether backward overwrites the logits with the gradient. Autograd reports an error if the
            logits are used afterwards. A leaf is never overwritten.

    Returns:
        logprob_T <= 0 and entropy_T in nats, float32 (float64 for float64 logits), differentiable in `logits_TV`.

    Raises ValueError for inconsistent shapes or options.
    """
    if logits_TV.shape[:-1] != labels_T.shape or labels_T.dim() != 1:
        raise ValueError(f"logits are {tuple(logits_TV.shape)} and labels {tuple(labels_T.shape)}; pass (T, V), (T,)")
    group, first, valid_rows = vocabulary_range(logits_TV.shape[1], tp_group, valid_vocab)
    scaling = Scaling.of(temperature, softcap, len(labels_T), logits_TV)
    shard = HeadShard(group, first, valid_rows, scaling, exact=True, triton=runs_triton(logits_TV))
    inplace = inplace_backward and not logits_TV.is_leaf
    return _LogitsLogprob.apply(logits_TV, labels_T - first, shard, entropy, inplace)


def _blocks(logits_TV: Tensor, triton: bool) -> list[slice]:
    rows = len(logits_TV)
    step = rows if triton else max(1, _CPU_BLOCK_BYTES // (4 * logits_TV.shape[1]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, max(1, step))]


class _LogitsLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: ContextWith[tuple[HeadShard, bool, bool]],
        logits_TV: Tensor,
        local_labels_T: Tensor,
        shard: HeadShard,
        entropy: bool,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        stats_4T = empty_statistics(len(local_labels_T), logits_TV)
        blocks = _blocks(logits_TV, shard.triton) if shard.valid_rows else []
        size = 0 if shard.triton or not blocks else (blocks[0].stop - blocks[0].start) * shard.valid_rows
        scratch = (stats_4T.new_empty(size), stats_4T.new_empty(size))
        for rows in blocks:
            block_CV, labels_C = logits_TV[rows, : shard.valid_rows], local_labels_T[rows]
            scaling = shard.scaling.of_rows(rows)
            update_statistics(
                stats_4T[:, rows], block_CV, labels_C, scaling, entropy=entropy, scratch=scratch, triton=shard.triton
            )
        stats_4T = merge_statistics(stats_4T, shard.group)
        ctx.save_for_backward(logits_TV, local_labels_T, stats_4T)
        ctx.saved = shard, entropy, inplace
        ctx.set_materialize_grads(False)
        return logprob_and_entropy(stats_4T, entropy=entropy)

    @staticmethod
    def backward(ctx: ContextWith[tuple[HeadShard, bool, bool]], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        shard, has_entropy, inplace = ctx.saved
        grad_logprob_T, grad_entropy_T = grads[0], grads[1] if has_entropy else None
        if grad_logprob_T is None and grad_entropy_T is None:
            return (None,) * 5
        logits_TV, local_labels_T, stats_4T = ctx.saved_tensors

        out_TV = logits_TV if inplace else torch.empty_like(logits_TV)
        gradients = RowGradients.of(stats_4T, grad_logprob_T, grad_entropy_T)
        for rows in _blocks(logits_TV, shard.triton) if shard.valid_rows else []:
            block_CV, out_CV = logits_TV[rows, : shard.valid_rows], out_TV[rows, : shard.valid_rows]
            work_CV = block_CV if shard.triton else block_CV.to(stats_4T.dtype, copy=True)
            labels_C, of_rows, scaling = local_labels_T[rows], gradients.of_rows(rows), shard.scaling.of_rows(rows)
            logits_gradient(work_CV, labels_C, of_rows, scaling, out_CV, triton=shard.triton)
        out_TV[:, shard.valid_rows :].zero_()
        return out_TV, None, None, None, None
