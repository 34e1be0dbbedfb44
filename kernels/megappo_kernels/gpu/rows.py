"""Triton kernels for softmax statistics of rows of logits, and for their gradient. Each logit is read once and
exponentiated once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from megappo_kernels.rows import RowGradients, Scaling

# With these sizes, no variant spills registers on any chip of `aot`. Times on an H100 are in
# benchmarks/results/2026-11-23-h100.md.
STATISTICS_BLOCK = 4096
GRADIENT_BLOCK = 1024
WARPS = 8


@triton.jit
def shift_to(new, m):
    """Return the difference between an old and a new maximum. Initially, m is -inf and the sum is 0. Their product
    must be 0 instead of NaN."""
    return tl.where(m == -float("inf"), 0.0, m - new)


@triton.jit
def decayed(x):
    """Return e^(-2|x|). tanh and its slope are computed from this number without cancellation."""
    return tl.exp(-2 * tl.abs(x))


@triton.jit
def soft_cap(z, cap):
    """Compute cap * tanh(z / cap). Near 0 a series avoids the cancellation of the formula with exp. Excluded logits
    (`rows.EXCLUDED`) do not change."""
    x = z / cap
    small = x * (1 - x * x * (1.0 / 3 - x * x * (2.0 / 15)))
    r = decayed(x)
    large = (1 - r) / (1 + r)
    capped = cap * tl.where(tl.abs(x) < 0.05, small, tl.where(x < 0, -large, large))
    return tl.where(z < -1e29, z, capped)


@triton.jit(
    do_not_specialize=["stats_stride"],
    do_not_specialize_on_alignment=["labels", "inverse_temperatures", "stats"],
)
def statistics_kernel(
    logits,
    row_stride,
    labels,
    inverse_temperatures,
    inverse_temperature,
    cap,
    stats,
    stats_stride,
    columns,
    PER_ROW: tl.constexpr,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge columns of a row into (m, s, u, t). One program processes one row."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.load(stats + row)
    s = tl.load(stats + stats_stride + row)
    u = tl.load(stats + 2 * stats_stride + row)
    t = tl.load(stats + 3 * stats_stride + row)
    if PER_ROW:
        inverse_temperature = tl.load(inverse_temperatures + row)
    logits += row * row_stride
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        z = tl.load(logits + offsets, mask=inside, other=0.0).to(tl.float32)
        if CAPPED:
            z = soft_cap(z, cap)
        z = tl.where(inside, z * inverse_temperature, -float("inf"))
        new = tl.maximum(m, tl.max(z, 0))
        shift = shift_to(new, m)
        scale = tl.exp(shift)
        e = tl.exp(z - new)
        if ENTROPY:
            u = (u + shift * s) * scale + tl.sum(tl.where(inside, e * (z - new), 0.0), 0)
        s = s * scale + tl.sum(e, 0)
        m = new
    label = tl.load(labels + row)
    is_local = (label >= 0) & (label < columns)
    target = tl.load(logits + label, mask=is_local, other=0.0).to(tl.float32)
    if CAPPED:
        target = soft_cap(target, cap)
    t = tl.where(is_local, target * inverse_temperature, t)
    tl.store(stats + row, m)
    tl.store(stats + stats_stride + row, s)
    tl.store(stats + 2 * stats_stride + row, u)
    tl.store(stats + 3 * stats_stride + row, t)


_PER_ROW = ["labels", "inverse_temperatures", "max_row", "sum_row", "weighted_row", "grad_logprob", "grad_entropy"]


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def gradient_kernel(
    logits,
    row_stride,
    labels,
    inverse_temperatures,
    inverse_temperature,
    cap,
    max_row,
    sum_row,
    weighted_row,
    grad_logprob,
    grad_entropy,
    out,
    out_stride,
    columns,
    PER_ROW: tl.constexpr,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of a block of a row. `out` may be `logits`."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    if PER_ROW:
        inverse_temperature = tl.load(inverse_temperatures + row)
    total = tl.load(sum_row + row)
    g_logprob = tl.load(grad_logprob + row)
    z = tl.load(logits + row * row_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    slope = inverse_temperature
    if CAPPED:
        r = decayed(z / cap)  # 1 - tanh^2 has cancellation for tanh near 1
        slope = inverse_temperature * 4 * r / ((1 + r) * (1 + r))
        z = soft_cap(z, cap)
    shifted = z * inverse_temperature - tl.load(max_row + row)
    p = tl.exp(shifted - tl.log(total))
    factor = g_logprob
    if ENTROPY:
        mean = tl.load(weighted_row + row) / total
        factor = g_logprob + tl.load(grad_entropy + row) * (shifted - mean)
    label = tl.load(labels + row)
    grad = tl.where(offsets == label, g_logprob, 0.0) - p * factor
    tl.store(out + row * out_stride + offsets, (grad * slope).to(out.dtype.element_ty), mask=inside)


def launch_statistics(
    stats_4C: Tensor, logits_CW: Tensor, labels_C: Tensor, scaling: Scaling, *, entropy: bool
) -> None:
    """Launch `rows.update_statistics`. The logits do not change."""
    if not len(labels_C):
        return
    per_row = isinstance(scaling.inverse_temperature, Tensor)
    statistics_kernel[(len(labels_C),)](
        logits_CW,
        logits_CW.stride(0),
        labels_C.contiguous(),
        scaling.inverse_temperature if per_row else stats_4C,
        1.0 if per_row else scaling.inverse_temperature,
        scaling.softcap or 1.0,
        stats_4C,
        stats_4C.stride(0),
        logits_CW.shape[1],
        PER_ROW=per_row,
        CAPPED=scaling.softcap is not None,
        ENTROPY=entropy,
        BLOCK=STATISTICS_BLOCK,
        num_warps=WARPS,
    )


def launch_gradient(logits_CW: Tensor, labels_C: Tensor, rows: RowGradients, scaling: Scaling, out_CW: Tensor) -> None:
    """Launch `rows.logits_gradient`."""
    if not len(labels_C):
        return
    per_row = isinstance(scaling.inverse_temperature, Tensor)
    gradient_kernel[(len(labels_C), triton.cdiv(logits_CW.shape[1], GRADIENT_BLOCK))](
        logits_CW,
        logits_CW.stride(0),
        labels_C.contiguous(),
        scaling.inverse_temperature if per_row else rows.max_C,
        1.0 if per_row else scaling.inverse_temperature,
        scaling.softcap or 1.0,
        rows.max_C.contiguous(),
        rows.sum_C.contiguous(),
        rows.weighted_C.contiguous(),
        rows.logprob_C.contiguous(),
        rows.entropy_C.contiguous() if rows.entropy_C is not None else rows.max_C,
        out_CW,
        out_CW.stride(0),
        logits_CW.shape[1],
        PER_ROW=per_row,
        CAPPED=scaling.softcap is not None,
        ENTROPY=rows.entropy_C is not None,
        BLOCK=GRADIENT_BLOCK,
        num_warps=WARPS,
    )
