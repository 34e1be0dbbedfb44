"""Copies small host tensors to a device, all in one copy that the host does not wait for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment in bytes of each tensor in the buffer; torch's own tensors are aligned at least as much, and kernels may
rely on it for wide loads."""


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies of host tensors on a device, as views of one buffer, ordered with the work that is queued next.

    For CUDA the host buffer is pinned memory, which torch does not reuse before it was read. A copy from other memory
    would wait until the device has finished all queued work.
    """
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors.values()]
    starts = [*itertools.accumulate((math.ceil(size / ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)]
    there = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, start, size in zip(tensors.values(), starts, sizes, strict=False):
        there[start : start + size].view(tensor.dtype).copy_(tensor.flatten())
    here = there.to(device, non_blocking=True)
    return {
        name: here[start : start + size].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), start, size in zip(tensors.items(), starts, sizes, strict=False)
    }
