"""Whitening statistics that merge exactly over blocks, ranks and batches (Chan et al. 1979)."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo_kernels.backend import runs_triton


def masked_whiten_stats(values: Tensor, mask: Tensor) -> Tensor:
    """(3,) float64: count, mean and sum of squared deviations of the values where `mask` (bool) is True.

    Any shape, float32 or float64; masked positions may hold anything. All zeros where nothing is valid. Gather those of
    all ranks and merge them with `merge_whiten_stats`. No host synchronisation.
    """
    if mask.shape != values.shape or mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype} {tuple(mask.shape)}, must be torch.bool {tuple(values.shape)}")
    if runs_triton(values):
        from megappo_kernels.gpu.whiten import launch_partials

        return merge_whiten_stats(launch_partials(values, mask))
    clean = values.masked_fill(~mask, 0.0).double()
    count = mask.sum(dtype=torch.float64)
    mean = clean.sum() / count.clamp(min=1)
    return torch.stack([count, mean, (clean - mean).masked_fill_(~mask, 0.0).square_().sum()])


def merge_whiten_stats(stats_R3: Tensor) -> Tensor:
    """(R, 3) statistics of parts -> (3,) of their union."""
    count_R, mean_R, m2_R = stats_R3.unbind(1)
    count = count_R.sum()
    mean = (count_R * mean_R).sum() / count.clamp(min=1)
    return torch.stack([count, mean, (m2_R + count_R * (mean_R - mean).square()).sum()])


def masked_whiten(values: Tensor, mask: Tensor, stats_3: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(values - mean) / sqrt(population variance + eps) where `mask` is True, 0 elsewhere; the type of `values`.

    The mean is subtracted in float64, because a float32 mean of values around a million is off by up to 0.03.
    Deviations within the rounding error are 0.
    """
    count, mean, m2 = stats_3.unbind()
    variance = m2 / count.clamp(min=1)
    rounding = rounding_of((mean.square() + variance).sqrt(), values.dtype)
    deviations = without_rounding(values.masked_fill(~mask, 0.0).double() - mean, variance.sqrt(), rounding)
    return (deviations * torch.rsqrt(variance + eps)).masked_fill_(~mask, 0.0).to(values.dtype)


def rounding_of(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound on the rounding error of the difference between values of this size in `dtype` and their mean."""
    return 2 * torch.finfo(dtype).eps * size


def without_rounding(deviations: Tensor, std: Tensor, rounding: Tensor) -> Tensor:
    """Deviations from a mean, with rounding errors set to exactly 0.

    Otherwise a policy loss would count tokens with an advantage of 1e-8 as clipped. Deviations up to `rounding` are set
    to 0. A deviation that is a large part of the standard deviation is kept, because the spread itself is small.
    """
    # A deviation of a tenth of the spread is no rounding of a mean, unless the spread is a hundredth of the rounding.
    bound = torch.minimum(rounding, torch.maximum(0.1 * std, 0.01 * rounding))
    return deviations.masked_fill(deviations.abs() <= bound, 0.0)
