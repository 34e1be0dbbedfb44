"""MXFP4 weights, as gpt-oss' experts are published (OCP Microscaling Formats 1.0, sections 5.2 and 5.3.3).

A row of inputs is cut into blocks of 32 numbers of four bits (e2m1), two of them in a byte, the lower bits first, with
one scale for each block: a power of two, its exponent plus 127 in a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUFFIXES = ("_blocks", "_scales")
"""Endings of the names of the tensors that are stored in the place of a plain one."""
BLOCK = 32
"""Numbers that share a scale."""
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_VALUES, -_VALUES])
_BIAS = 127


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise to (rows, columns) in float32, whose values bfloat16 holds exactly, from (rows, columns / 32, 16)
    uint8 pairs of numbers and (rows, columns / 32) uint8 exponents."""
    pairs = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1)
    numbers = _VALUES[pairs.int()].flatten(-2)
    return torch.ldexp(numbers, scales.int().sub_(_BIAS).unsqueeze(-1)).flatten(-2)
