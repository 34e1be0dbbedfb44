"""Output layer and policy loss in one pass: 6NHV operations, without recomputation and without (T, V) logits.

The gradient of a token's logits depends on its log-probability, its entropy and constants. These values are
available as soon as the logits are computed. Forward therefore processes the rows in chunks. The steps of a chunk
are: logits, statistics, one exchange between the ranks that share the vocabulary, loss, in-place gradient of the
logits, gradients of the hidden states and of the weight. Backward only returns these gradients. Rows without weight
in the loss are skipped. An objective that uses whole sequences requires the log-probabilities of all chunks first.

Shape legend: T rows, N valid rows, C rows of a chunk, P rows of one evaluation of the loss, H hidden size, V
vocabulary rows on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo_kernels.autograd import ContextWith
from megappo_kernels.blocks import CHUNK_BYTES
from megappo_kernels.gemm import MIN_ROWS, LogitsGemm, add_product
from megappo_kernels.lm_head import HeadShard
from megappo_kernels.losses import Loss, PolicyInputs, check_inputs, evaluate, whole_loss
from megappo_kernels.metrics import combine, stacked
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.rows import Exclusion, RowGradients, empty_statistics, logprob_and_entropy, merge_statistics
from megappo_kernels.softmax import logits_gradient, update_statistics

_CHUNK_ROWS = 128
"""The number of rows of a chunk is a multiple of this number, except in small chunks."""
# Number of logits columns that a CPU processes at a time. The scratch buffers have this width.
_SLICE_CPU = 1024


@dataclass(frozen=True)
class HeadLoss(Loss):
    """Loss with the log-probabilities and entropies of its rows, which are detached. Skipped rows have zeros."""

    logprob_T: Tensor
    entropy_T: Tensor


def ppo_head_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    inputs: PolicyInputs,
    *,
    objective: PolicyObjective | None = None,
    temperature: float | Tensor = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    context_group: dist.ProcessGroup | None = None,
    valid_vocab: int | None = None,
    softcap: float | None = None,
    sequence_parallel: bool = False,
    accumulate_main_grad: bool = False,
    upstream: float = 1.0,
    exclusion: Exclusion | None = None,
) -> HeadLoss:
    """Compute the policy loss of labels under softmax(cap(hidden @ weight.T) / temperature).

    The loss is differentiable in `hidden_TH` and `weight_VH`. It equals `ppo_token_loss` on the results of
    `linear_logprob`, with 6 instead of 8 NHV operations.

    Args:
        hidden_TH, weight_VH, labels_T, temperature, tp_group, valid_vocab, softcap, sequence_parallel, exclusion: as
            in `linear_logprob`.
        inputs: (T,) each. Rows with mask False or weight 0 are skipped. These rows have no cost, no effect on metrics
            and zero gradients.
        objective: default: PPO-clip with 0.2.
        context_group: ranks with other rows of the same sequences and the same numbers in `inputs.sequences`.
        accumulate_main_grad: add the weight's gradient to `weight.main_grad` (float32, Megatron's) during forward, and
            set `weight.grad_added_to_main_grad`. Backward then sets `weight.grad` to a placeholder that uses no memory.
            Megatron's hooks require and drop the placeholder. A weight without requires_grad has no gradient.
        upstream: with `accumulate_main_grad`, the gradient of the loss in backward. Other gradients raise an error.

    Returns the loss in float32 (float64 for float64), its report, and the log-probabilities and entropies of the
    rows. Raises ValueError for inconsistent shapes, types or options.
    """
    check_inputs(inputs.tensors(), labels_T.shape)
    accumulate_main_grad &= weight_VH.requires_grad
    if accumulate_main_grad and not hasattr(weight_VH, "main_grad"):
        raise ValueError("the weight has no main_grad; wrap the model in Megatron's DistributedDataParallel")
    shard = HeadShard.of(
        hidden_TH,
        weight_VH,
        labels_T,
        temperature=temperature,
        tp_group=tp_group,
        valid_vocab=valid_vocab,
        softcap=softcap,
        exact=True,
        exclusion=exclusion,
    )
    upstream = upstream if accumulate_main_grad else 1.0
    options = _Options(shard, objective or PolicyObjective(), context_group, accumulate_main_grad, upstream)
    trains = torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_VH.requires_grad)
    with torch.no_grad():
        forward = _forward(hidden_TH, weight_VH, labels_T - shard.first, inputs, options, trains, not sequence_parallel)
    loss = _WithGradients.apply(hidden_TH, weight_VH, forward, options) if trains else forward.loss
    logprob_T, entropy_T = forward.outputs_2T.unbind(0)
    return HeadLoss(loss, {**forward.report, "loss": forward.loss.double()}, logprob_T, entropy_T)


@dataclass(frozen=True)
class _Options:
    shard: HeadShard
    objective: PolicyObjective
    context_group: dist.ProcessGroup | None
    accumulate_main_grad: bool
    upstream: float


@dataclass
class _Forward:
    """Results of forward. Backward removes the gradients."""

    loss: Tensor
    report: dict[str, Tensor]
    outputs_2T: Tensor
    gradients: tuple[Tensor, Tensor | None] | None
    """Gradients of the hidden states and of the weight. The gradient of the weight is None if it was added to
    `main_grad`. The field is None after backward."""


def _forward(
    hidden_TH: Tensor,
    weight_VH: Any,  # Megatron adds attributes to the weight
    local_labels_T: Tensor,
    inputs: PolicyInputs,
    options: _Options,
    trains: bool,
    reduce_hidden: bool,
) -> _Forward:
    rows_N = torch.nonzero(inputs.mask & (inputs.weights != 0)).squeeze(1)
    grad_weight_VH = None
    if trains and weight_VH.requires_grad:
        grad_weight_VH = weight_VH.main_grad if options.accumulate_main_grad else _accumulator(weight_VH)
    chunks = _Chunks(hidden_TH[rows_N], weight_VH, local_labels_T[rows_N], inputs.of_rows(rows_N), options, rows_N)
    report = chunks.run(grad_weight_VH, trains=trains)
    outputs_2T = chunks.outputs_2N.new_zeros(2, len(local_labels_T)).index_copy_(1, rows_N, chunks.outputs_2N)
    gradients = None
    if trains:
        if options.shard.group is not None and reduce_hidden:
            dist.all_reduce(chunks.grad_hidden_NH, group=options.shard.group)
        grad_hidden_TH = torch.zeros_like(hidden_TH).index_copy_(0, rows_N, chunks.grad_hidden_NH.to(hidden_TH.dtype))
        gradients = grad_hidden_TH, None if options.accumulate_main_grad else grad_weight_VH
        if options.accumulate_main_grad:
            weight_VH.grad_added_to_main_grad = True
    return _Forward(whole_loss(report).to(outputs_2T.dtype), report, outputs_2T, gradients)


class _WithGradients(torch.autograd.Function):
    """Loss with gradients that were computed in forward."""

    @staticmethod
    def forward(
        ctx: ContextWith[tuple[_Forward, _Options]],
        hidden_TH: Tensor,
        weight_VH: Tensor,
        results: _Forward,
        options: _Options,
    ) -> Tensor:
        ctx.save_for_backward(weight_VH)
        ctx.saved = results, options
        return results.loss.clone()

    @staticmethod
    def backward(ctx: ContextWith[tuple[_Forward, _Options]], *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight_VH,) = ctx.saved_tensors
        results, options = ctx.saved
        if results.gradients is None:
            raise RuntimeError("the gradients of ppo_head_loss were already used; call ppo_head_loss again")
        (grad_hidden_TH, grad_weight_VH), results.gradients = results.gradients, None
        if options.accumulate_main_grad:
            _expect_upstream(grads[0], options.upstream)
            _leave_placeholder(weight_VH)
        else:
            grad_hidden_TH.mul_(grads[0])
            if grad_weight_VH is not None:
                grad_weight_VH = grad_weight_VH.mul_(grads[0]).to(weight_VH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None


def _leave_placeholder(weight_VH: Tensor) -> None:
    """Set `weight.grad` to a placeholder. Megatron's hooks require `grad` if reductions overlap with backward.

    The placeholder is a single number, expanded to the shape of the weight. Autograd would copy a gradient with such
    strides, so the function sets `grad` directly. If the weight is also an embedding on the same stage
    (`zero_out_wgrad`), the embedding sets `grad`.
    """
    if weight_VH.grad is None and not getattr(weight_VH, "zero_out_wgrad", False):
        weight_VH.grad = weight_VH.new_zeros(()).expand_as(weight_VH)


def _expect_upstream(grad: Tensor, upstream: float) -> None:
    """Raise an error if the loss received a gradient other than `upstream`. The weight's gradient is already in
    main_grad."""
    if grad.is_cuda:
        torch._assert_async(grad == upstream)
    elif float(grad) != upstream:
        raise RuntimeError(f"the loss received the gradient {float(grad)}, but upstream={upstream} was declared")


def _accumulator(weight_VH: Tensor) -> Tensor:
    wide = weight_VH.dtype if weight_VH.dtype == torch.float64 else torch.float32
    return torch.zeros(weight_VH.shape, dtype=wide, device=weight_VH.device)


class _Chunks:
    """Valid rows, processed in chunks with reused buffers."""

    def __init__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        labels_N: Tensor,
        inputs_N: PolicyInputs,
        options: _Options,
        rows_N: Tensor,
    ) -> None:
        self.hidden_NH, self.labels_N, self.inputs_N, self.options = hidden_NH, labels_N, inputs_N, options
        self.shard = options.shard.compacted(rows_N)
        self.weight_VH = weight_VH[: self.shard.valid_rows]
        n, device = len(labels_N), hidden_NH.device
        dtype = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        self.outputs_2N = torch.zeros(2, n, dtype=dtype, device=device)
        self.grad_hidden_NH = torch.zeros(hidden_NH.shape, dtype=dtype, device=device)
        # The chunk size depends on the rows of the whole shard, including padding. All ranks therefore have the same
        # chunks, and collectives match.
        chunk = max(1, CHUNK_BYTES[hidden_NH.device.type] // (6 * len(weight_VH)))
        self.chunk = max(1, min(chunk // _CHUNK_ROWS * _CHUNK_ROWS or chunk, n))
        padded = self.chunk if hidden_NH.is_cuda else max(self.chunk, MIN_ROWS)
        self.logits = torch.empty(padded, self.shard.valid_rows, dtype=dtype, device=device)
        self.low = self.logits
        if hidden_NH.dtype != dtype:
            self.low = torch.empty(self.chunk, self.shard.valid_rows, dtype=hidden_NH.dtype, device=device)
        self.width = max(1, self.shard.valid_rows) if self.shard.triton else _SLICE_CPU

    def run(self, grad_weight_VH: Tensor | None, *, trains: bool) -> dict[str, Tensor]:
        """Process all chunks and return the report.

        The objective is evaluated for each chunk. An objective of whole sequences is evaluated once for all chunks,
        and gradients of several chunks then require a recomputation of the logits.

        Gradients are computed only if `trains` is true. The gradient of the weight is computed only if
        `grad_weight_VH` is a tensor.
        """
        n = len(self.labels_N)
        chunks = [slice(start, min(start + self.chunk, n)) for start in range(0, n, self.chunk)]
        at_once = self.options.objective.sees_sequences or not chunks
        reports = []
        for part in [chunks] if at_once else [[rows] for rows in chunks]:
            stats = [self._forward(rows) for rows in part]
            first, last = (part[0].start, part[-1].stop) if part else (0, 0)
            logprob_P, entropy_P = self.outputs_2N[:, first:last]
            inputs_P = self.inputs_N.of_rows(slice(first, last)).tensors()
            tensors = {"logprob": logprob_P, "entropy": entropy_P, **inputs_P}
            result = evaluate(self.options.objective, tensors, self.options.context_group)
            reports.append(result.report)
            for rows, stats_4C in zip(part, stats, strict=True) if trains else ():
                if len(part) > 1:
                    self._statistics(rows)
                own = slice(rows.start - first, rows.stop - first)
                slopes = {name: slope_P[own] for name, slope_P in result.slopes.items()}
                self._backward(rows, stats_4C, slopes, grad_weight_VH)
        return reports[0] if at_once else combine(stacked(reports))

    def _forward(self, rows: slice) -> Tensor:
        """Compute log-probabilities and entropies of a chunk. Return its statistics over the whole vocabulary, (4,
        C)."""
        stats_4C = merge_statistics(self._statistics(rows), self.shard.group)
        self.outputs_2N[:, rows] = torch.stack(logprob_and_entropy(stats_4C, entropy=True))
        return stats_4C

    def _backward(
        self, rows: slice, stats_4C: Tensor, slopes: Mapping[str, Tensor], grad_weight_VH: Tensor | None
    ) -> None:
        """Add the gradients of a chunk. The buffer contains the logits of the chunk."""
        if not self.shard.valid_rows:
            return
        up = self.options.upstream
        entropy_C = up * slopes["entropy"] if self.options.objective.slopes_in_entropy else None
        self._gradients(rows, RowGradients.of(stats_4C, up * slopes["logprob"], entropy_C), grad_weight_VH)

    def _slices(self) -> list[slice]:
        n = self.shard.valid_rows
        return [slice(first, min(first + self.width, n)) for first in range(0, n, self.width)]

    def _statistics(self, rows: slice) -> Tensor:
        """Compute the logits of a chunk. Return (4, C) statistics of this rank's part of the vocabulary."""
        n = rows.stop - rows.start
        stats_4C = empty_statistics(n, self.hidden_NH)
        gemm = LogitsGemm(self.hidden_NH[rows], self.width, exact=True)
        size = 0 if self.shard.triton else n * self.width
        scratch = (stats_4C.new_empty(size), stats_4C.new_empty(size))
        shard, labels_C, triton = self.shard.compacted(rows), self.labels_N[rows], self.shard.triton
        scaling = shard.scaling
        for columns in self._slices():
            logits_CW = gemm.into(self.weight_VH[columns], self.logits[: gemm.padded_rows, columns])[:n]
            shard.exclude_(logits_CW, columns.start)
            local_C = labels_C - columns.start
            update_statistics(stats_4C, logits_CW, local_C, scaling, entropy=True, scratch=scratch, triton=triton)
        return stats_4C

    def _gradients(self, rows: slice, gradients: RowGradients, grad_weight_VH: Tensor | None) -> None:
        n = rows.stop - rows.start
        logits_CV, low_CV, labels_C = self.logits[:n], self.low[:n], self.labels_N[rows]
        scaling, triton = self.shard.scaling.of_rows(rows), self.shard.triton
        for columns in self._slices():
            local_C, out_CW = labels_C - columns.start, low_CV[:, columns]
            logits_gradient(logits_CV[:, columns], local_C, gradients, scaling, out_CW, triton=triton)
        # On a part of the vocabulary, a gradient may be larger than the sum over ranks, and its rounding error too.
        add_product(self.grad_hidden_NH[rows], low_CV, self.weight_VH, rounds=self.shard.group is None)
        if grad_weight_VH is not None:
            add_product(grad_weight_VH[: self.shard.valid_rows], low_CV.T, self.hidden_NH[rows], rounds=True)
