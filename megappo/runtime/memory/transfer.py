"""Copies of small host tensors to a device, in a single asynchronous copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment in bytes of each tensor in the buffer. torch aligns its own tensors at least as much, and kernels may rely
on this alignment for wide loads."""


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy host tensors to a device. The results are views of one buffer, and are ordered with later work.

    For CUDA the host buffer is pinned memory. torch does not reuse this memory before the copy has read it. A copy from
    other memory would wait until the device has finished all queued work.
    """
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors.values()]
    starts = [*itertools.accumulate((math.ceil(size / ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)]
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, start, size in zip(tensors.values(), starts, sizes, strict=False):
        host[start : start + size].view(tensor.dtype).copy_(tensor.flatten())
    on_device = host.to(device, non_blocking=True)
    return {
        name: on_device[start : start + size].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), start, size in zip(tensors.items(), starts, sizes, strict=False)
    }
