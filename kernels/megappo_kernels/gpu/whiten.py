"""Triton kernel for count, mean and sum of squared deviations of blocks of masked values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["values", "mask"])
def whiten_kernel(values, mask, partials, n, BLOCK: tl.constexpr):
    """Store count, mean and sum of squared deviations of a block in `partials` (programs, 3) float64.

    The float32 mean is rounded; values around a million have an error of up to 0.03. The mean of the deviations
    corrects this error, exactly up to the float32 rounding of deviations.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = tl.load(mask + offsets, mask=offsets < n, other=0) != 0
    x = tl.load(values + offsets, mask=valid, other=0.0).to(tl.float32)
    count = tl.sum(valid.to(tl.float32), 0)
    near_mean = tl.sum(x, 0) / tl.maximum(count, 1.0)
    deviation = tl.where(valid, x - near_mean, 0.0)
    rest = tl.sum(deviation, 0) / tl.maximum(count, 1.0)
    squares = tl.sum(deviation * deviation, 0) - count * rest * rest
    partials += tl.program_id(0) * 3
    tl.store(partials, count.to(tl.float64))
    tl.store(partials + 1, near_mean.to(tl.float64) + rest.to(tl.float64))
    tl.store(partials + 2, tl.maximum(squares, 0.0).to(tl.float64))


def launch_partials(values: Tensor, mask: Tensor) -> Tensor:
    """Return count, mean and sum of squared deviations of each block, (blocks, 3) float64."""
    programs = max(1, triton.cdiv(values.numel(), BLOCK))
    partials = torch.empty(programs, 3, dtype=torch.float64, device=values.device)
    whiten_kernel[(programs,)](
        values.contiguous(),
        mask.contiguous().view(torch.uint8),
        partials,
        values.numel(),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return partials
