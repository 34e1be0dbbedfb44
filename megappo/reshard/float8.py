"""Block-scaled float8 weights, as in the published folders of DeepSeek-V3, Kimi-K2 and Qwen FP8 models.

A matrix is stored in float8 (e4m3) together with `NAME_scale_inv`, which has one number per block of rows and columns
(128 x 128 in those folders). Blocks at the lower and right edge are smaller. A weight is the product of its float8
value and the number of its block.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_SUFFIX = "_scale_inv"
WEIGHT_TYPE = "F8_E4M3"
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
"""Permitted types of scales, with the names of safetensors. float32 represents all values of these types exactly."""


def scale_shape(shape: tuple[int, ...], blocks: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix: rows and columns of blocks."""
    return tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))


def dequantised(
    stored_RC: Tensor, scales: Tensor, blocks: tuple[int, int], *, first_row: int = 0, first_column: int = 0
) -> Tensor:
    """Dequantise a part of a matrix to float32. The part begins at `first_row` and `first_column`.

    `scales` are the scales of the whole matrix. Each product of an e4m3 number and a float32 is rounded once.
    """
    rows, columns = stored_RC.shape
    block_rows, block_columns = blocks
    row_blocks = torch.arange(first_row, first_row + rows) // block_rows
    scales_RB = scales.to(torch.float32)[row_blocks]
    values_RC = stored_RC.to(torch.float32)
    # Process one block of columns at a time, to avoid a second matrix of the same size.
    start = 0
    while start < columns:
        number = (first_column + start) // block_columns
        stop = min((number + 1) * block_columns - first_column, columns)
        values_RC[:, start:stop] *= scales_RB[:, number, None]
        start = stop
    return values_RC
