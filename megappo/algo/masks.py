"""Checks and cleaning that every masked function starts with."""

from __future__ import annotations

import torch
from torch import Tensor


def check_mask(mask: Tensor, **tensors: Tensor | None) -> None:
    """Raise TypeError where `mask` is not bool, ValueError where a tensor has another shape."""
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}, must be torch.bool; pass mask.bool()")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be the mask's {tuple(mask.shape)}")


def clean(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 at masked positions, before any arithmetic: 0 * NaN is NaN, in gradients too."""
    return values.masked_fill(~mask, 0.0)
