"""Whitening statistics that are combined exactly over blocks, ranks and batches (Chan et al. 1979)."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo_kernels.backend import runs_triton


def masked_whiten_stats(values: Tensor, mask: Tensor) -> Tensor:
    """Return (3,) float64: count, mean and sum of squared deviations of the values with `mask` (bool) True.

    The values have any shape, and are float32 or float64. Masked positions may contain any value. Without valid
    values the result is zeros. To whiten over ranks, gather the statistics and call `merge_whiten_stats`. The
    function does not synchronise with the host.
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
    """Combine the statistics of R parts: (R, 3) -> (3,)."""
    count_R, mean_R, m2_R = stats_R3.unbind(1)
    count = count_R.sum()
    mean = (count_R * mean_R).sum() / count.clamp(min=1)
    return torch.stack([count, mean, (m2_R + count_R * (mean_R - mean).square()).sum()])


def masked_whiten(values: Tensor, mask: Tensor, stats_3: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Return (values - mean) / sqrt(population variance + eps), and 0 for masked positions, in the dtype of
    `values`.

    The mean is subtracted in float64, because a float32 mean of values around a million has an error of up to 0.03.
    Deviations within the rounding error are 0.
    """
    count, mean, m2 = stats_3.unbind()
    variance = m2 / count.clamp(min=1)
    rounding = rounding_of((mean.square() + variance).sqrt(), values.dtype)
    deviations = without_rounding(values.masked_fill(~mask, 0.0).double() - mean, variance.sqrt(), rounding)
    return (deviations * torch.rsqrt(variance + eps)).masked_fill_(~mask, 0.0).to(values.dtype)


def rounding_of(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bound on the rounding error of the difference between values of this size in `dtype` and their mean."""
    return 2 * torch.finfo(dtype).eps * size


def without_rounding(deviations: Tensor, std: Tensor, rounding: Tensor) -> Tensor:
    """Set deviations from a mean that are rounding errors to 0.

    A policy loss would count tokens with an advantage of 1e-8 as clipped. Deviations up to `rounding` are set to 0.
    A deviation that is large compared with the standard deviation is not changed, because the spread itself is
    small.
    """
    # A deviation above a tenth of the spread is not a rounding error, unless the spread is below a hundredth of
    # `rounding`.
    bound = torch.minimum(rounding, torch.maximum(0.1 * std, 0.01 * rounding))
    return deviations.masked_fill(deviations.abs() <= bound, 0.0)
