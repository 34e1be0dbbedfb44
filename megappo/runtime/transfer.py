"""Small tensors of the host on a device, all in one copy that the host does not wait for."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; where a tensor of torch's own begins at least, so that kernels may read as much at once."""


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies of tensors of the host on a device, parts of one buffer there, in order with what is computed next.

    For CUDA the host's side of the copy is pinned memory, which torch does not hand out again before it was read; out
    of any other memory a copy waits until the device has done all that was asked of it.
    """
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors.values()]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + math.ceil(size / ALIGNMENT) * ALIGNMENT)
    there = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, start, size in zip(tensors.values(), starts, sizes, strict=False):
        there[start : start + size].view(tensor.dtype).copy_(tensor.flatten())
    here = there.to(device, non_blocking=True)
    return {
        name: here[start : start + size].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), start, size in zip(tensors.items(), starts, sizes, strict=False)
    }
