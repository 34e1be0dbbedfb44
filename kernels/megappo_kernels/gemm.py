"""Matrix products around the output layer, with float32 sums wherever torch provides them, and the widths that torch's
grouped product of experts takes.

Shape legend: C rows of a block, H hidden size, W columns (vocabulary rows) of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MIN_ROWS = 16
"""Fewest rows of a product. With fewer, a CPU's GEMM uses other kernels, whose sums differ in the last bit from those
of a larger batch."""
# Rows and columns that are converted to float32 at a time, so that the copies stay small.
_WIDENED = 4096
_ROUNDED = 1024
"""Rows of a product that stay in a CPU's caches until they are added."""


# What torch's `grouped_mm` accepts in forward and backward: these types, and rows of whole 16 bytes.
_GROUPED_TYPES = (torch.bfloat16, torch.float32)
_GROUPED_ROW_BYTES = 16


def takes_grouped(dtype: torch.dtype, *widths: int) -> bool:
    """Whether the grouped product of torch accepts matrices of these widths, in forward and backward."""
    return dtype in _GROUPED_TYPES and all(width * dtype.itemsize % _GROUPED_ROW_BYTES == 0 for width in widths)


class LogitsGemm:
    """float32 logits of one block of rows against slices of the output matrix, in reused buffers.

    With bfloat16 inputs on a CPU, torch's GEMM returns bfloat16. `exact` then multiplies in float32 (products of
    bfloat16 numbers are exact there); without it the logits are rounded, at about 2.4 times the speed where the CPU has
    bfloat16 instructions. On CUDA the float32 accumulators are returned unrounded.
    """

    def __init__(self, hidden_CH: Tensor, columns: int, *, exact: bool) -> None:
        self.rows = len(hidden_CH)
        self.padded_rows = padded = self.rows if hidden_CH.is_cuda else max(self.rows, MIN_ROWS)
        if padded > self.rows:
            hidden_CH = torch.nn.functional.pad(hidden_CH, (0, 0, 0, padded - self.rows))
        on_cpu_in_bf16 = hidden_CH.dtype == torch.bfloat16 and not hidden_CH.is_cuda
        self._widens, self._rounds = on_cpu_in_bf16 and exact, on_cpu_in_bf16 and not exact
        self._hidden_CH = hidden_CH.float() if self._widens else hidden_CH
        dtype = torch.float64 if hidden_CH.dtype == torch.float64 else torch.float32
        device = hidden_CH.device
        self._size, self._dtype, self._buffer = padded * columns, dtype, torch.empty(0, dtype=dtype, device=device)
        self._rounded = torch.empty(padded * columns if self._rounds else 0, dtype=torch.bfloat16, device=device)
        self._wide = torch.empty(columns if self._widens else 0, hidden_CH.shape[1], dtype=torch.float32, device=device)

    def into(self, weight_WH: Tensor, out_CW: Tensor) -> Tensor:
        """Write the logits to `out_CW`, which has `padded_rows` rows; returns it."""
        if self._widens:
            wide_WH = self._wide[: len(weight_WH)].copy_(weight_WH)
            with bf16_valued_inputs():
                return torch.mm(self._hidden_CH, wide_WH.T, out=out_CW)
        if self._rounds:
            rounded_CW = self._rounded[: out_CW.numel()].view(out_CW.shape)
            return out_CW.copy_(torch.mm(self._hidden_CH, weight_WH.T, out=rounded_CW))
        if self._hidden_CH.dtype != out_CW.dtype:
            return torch.mm(self._hidden_CH, weight_WH.T, out_dtype=out_CW.dtype, out=out_CW)
        return torch.mm(self._hidden_CH, weight_WH.T, out=out_CW)

    def __call__(self, weight_WH: Tensor) -> Tensor:
        """(C, W) logits; valid until the next call."""
        if not len(self._buffer):
            self._buffer = torch.empty(self._size, dtype=self._dtype, device=weight_WH.device)
        shape = (self.padded_rows, len(weight_WH))
        return self.into(weight_WH, self._buffer[: shape[0] * shape[1]].view(shape))[: self.rows]


@contextmanager
def bf16_valued_inputs() -> Iterator[None]:
    """Let oneDNN read float32 matrices as bfloat16: exact where they hold bfloat16 values, fast with AMX."""
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def add_product(total: Tensor, left: Tensor, right: Tensor, *, rounds: bool = False) -> None:
    """total += left @ right, with every product and sum in the precision of `total`.

    `rounds` lets a CPU round the product of bfloat16 matrices to bfloat16 before it is added, in a half to a quarter of
    the time. It is meant for results that are rounded in any case: the gradient of a weight, as in every other layer,
    or the only product of a sum that is returned in bfloat16.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif rounds:
        for some, of_left in zip(total.split(_ROUNDED), left.split(_ROUNDED), strict=True):
            some += of_left @ right
    else:
        with bf16_valued_inputs():
            for rows in _blocks(len(left)):
                for inner in _blocks(len(right)):
                    total[rows].addmm_(left[rows, inner].float(), right[inner].float())


def _blocks(n: int) -> list[slice]:
    """Slices of 0:n whose float32 copies stay small."""
    return [slice(start, start + _WIDENED) for start in range(0, n, _WIDENED)]
