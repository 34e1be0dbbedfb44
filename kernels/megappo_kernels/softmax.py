"""Statistics of rows of logits, and the gradient of the logits. The formulas are in `rows`.

Shape legend: C rows of a block, W columns of a slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo_kernels.rows import RowGradients, Scaling


def update_statistics(
    stats_4C: Tensor,
    logits_CW: Tensor,
    labels_C: Tensor,
    scaling: Scaling,
    *,
    entropy: bool,
    scratch: tuple[Tensor, Tensor] | None = None,
    triton: bool = False,
) -> None:
    """Add a slice of columns to the statistics in place.

    Args:
        stats_4C: result of `empty_statistics` or of an earlier call.
        logits_CW: float32 or float64; overwritten without `scratch`.
        labels_C: int64, relative to the first column of the slice. Labels outside the slice are ignored.
        scaling: scaling of these rows.
        entropy: whether u is needed.
        scratch: two flat buffers. None: `logits_CW` is used as buffer.
        triton: whether to run the Triton kernel, which needs no buffers and does not change the logits.
    """
    if triton:
        from megappo_kernels.gpu.rows import launch_statistics

        launch_statistics(stats_4C, logits_CW, labels_C, scaling, entropy=entropy)
        return
    max_C, sum_C, weighted_C, target_C = stats_4C.unbind(0)
    shape, size = logits_CW.shape, logits_CW.numel()
    work_CW = logits_CW if scratch is None else scratch[0][:size].view(shape)
    if scaling.softcap is None and isinstance(scaling.inverse_temperature, float):
        factor = scaling.inverse_temperature
        at_labels_C = _at_labels(logits_CW, labels_C).to(max_C.dtype) * factor
        new_C = torch.maximum(max_C, logits_CW.amax(-1) * factor)
        shifted_CW = torch.add(-new_C[:, None], logits_CW, alpha=factor, out=work_CW)
    else:
        scaled_CW = scaling.scale_(work_CW if work_CW is logits_CW else work_CW.copy_(logits_CW))
        at_labels_C = _at_labels(scaled_CW, labels_C)
        new_C = torch.maximum(max_C, scaled_CW.amax(-1))
        shifted_CW = scaled_CW.sub_(new_C[:, None])
    inside_C = (labels_C >= 0) & (labels_C < shape[1])
    torch.where(inside_C, at_labels_C, target_C, out=target_C)
    # Before the first slice, m is -inf and s is 0. Their product must be 0 instead of NaN.
    shift_C = (max_C - new_C).masked_fill_(max_C == -torch.inf, 0.0)
    scale_C = shift_C.exp()
    if entropy:
        weighted_C.add_(shift_C.mul_(sum_C)).mul_(scale_C)
        exp_CW = torch.exp(shifted_CW) if scratch is None else torch.exp(shifted_CW, out=scratch[1][:size].view(shape))
        sum_C.mul_(scale_C).add_(exp_CW.sum(-1))
        weighted_C.add_(exp_CW.mul_(shifted_CW).sum(-1))
    else:
        sum_C.mul_(scale_C).add_(shifted_CW.exp_().sum(-1))
    max_C.copy_(new_C)


def _at_labels(values_CW: Tensor, labels_C: Tensor) -> Tensor:
    """Return the values at the labels, (C,). Values for labels outside the slice are arbitrary."""
    return values_CW.gather(1, labels_C.clamp(0, values_CW.shape[1] - 1)[:, None]).squeeze(1)


def logits_gradient(
    logits_CW: Tensor,
    labels_C: Tensor,
    rows: RowGradients,
    scaling: Scaling,
    out_CW: Tensor,
    *,
    triton: bool = False,
) -> Tensor:
    """Write the gradient of the logits to `out_CW` and return `out_CW`. The torch implementation overwrites the
    logits.

    Args:
        logits_CW: logits as in `update_statistics`, any float dtype.
        labels_C: labels relative to the first column.
        out_CW: output of any float dtype; may be `logits_CW`.
    """
    if triton:
        from megappo_kernels.gpu.rows import launch_gradient

        launch_gradient(logits_CW, labels_C, rows, scaling, out_CW)
        return out_CW
    exact_CW = logits_CW if logits_CW.dtype == rows.max_C.dtype else logits_CW.to(rows.max_C.dtype)
    slope_CW = None
    if scaling.softcap is not None:
        exact_CW.div_(scaling.softcap)
        # 1 - tanh^2 from r = e^(-2|x|), which has no cancellation for tanh near 1.
        r_CW = exact_CW.abs().mul_(-2).exp_()
        slope_CW = 4 * r_CW / (1 + r_CW).square_()
        exact_CW.tanh_().mul_(scaling.softcap)
    if not scaling.is_identity:
        exact_CW.mul_(scaling.column())
    shifted_CW = exact_CW.sub_(rows.max_C[:, None])
    log_sum_C = rows.sum_C.log()
    if rows.entropy_C is None:
        grad_CW = shifted_CW.sub_(log_sum_C[:, None]).exp_().mul_(-rows.logprob_C[:, None])
    else:
        # -p (g_l + g_H (z - M - U/S))
        prob_CW = (shifted_CW - log_sum_C[:, None]).exp_()
        shifted_CW.sub_((rows.weighted_C / rows.sum_C)[:, None]).mul_(rows.entropy_C[:, None])
        grad_CW = shifted_CW.add_(rows.logprob_C[:, None]).mul_(prob_CW).neg_()
    inside_C = (labels_C >= 0) & (labels_C < logits_CW.shape[1])
    column_C1 = labels_C.clamp(0, logits_CW.shape[1] - 1)[:, None]
    grad_CW.scatter_add_(1, column_C1, torch.where(inside_C, rows.logprob_C, 0.0)[:, None].to(grad_CW.dtype))
    if slope_CW is not None:
        grad_CW.mul_(slope_CW)
    if not scaling.is_identity:
        grad_CW.mul_(scaling.column())
    return out_CW if out_CW is grad_CW else out_CW.copy_(grad_CW)
