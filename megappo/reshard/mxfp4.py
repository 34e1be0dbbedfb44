"""MXFP4 weights, as in the published experts of gpt-oss (OCP Microscaling Formats 1.0, sections 5.2 and 5.3.3).

A row of inputs consists of blocks of 32 four-bit numbers (e2m1). A byte contains two numbers, the lower bits first.
Each block has one scale, a power of two. The scale is stored as a byte with the exponent plus 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUFFIXES = ("_blocks", "_scales")
"""Name suffixes of the tensors that replace a plain tensor."""
BLOCK = 32
"""Number of values that share a scale."""
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_VALUES, -_VALUES])
_BIAS = 127


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise to (rows, columns) in float32. bfloat16 represents the values exactly.

    The inputs are (rows, columns / 32, 16) uint8 pairs of numbers and (rows, columns / 32) uint8 exponents.
    """
    pairs = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1)
    numbers = _VALUES[pairs.int()].flatten(-2)
    return torch.ldexp(numbers, scales.int().sub_(_BIAS).unsqueeze(-1)).flatten(-2)
