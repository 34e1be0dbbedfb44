"""Checks and cleaning of masked tensors, used by every masked function."""

from __future__ import annotations

import torch
from torch import Tensor


def check_mask(mask: Tensor, **tensors: Tensor | None) -> None:
    """Raise TypeError if `mask` is not bool, and ValueError if a tensor has a different shape."""
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}, must be torch.bool; pass mask.bool()")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be the mask's {tuple(mask.shape)}")


def clean(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` with 0 at masked positions. Arithmetic must follow this call, because 0 * NaN is NaN, in
    gradients too."""
    return values.masked_fill(~mask, 0.0)
