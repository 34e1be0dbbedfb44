"""Matrix products of the output layer with float32 sums, and the check for torch's grouped product of experts.

Shape legend: C rows of a block, H hidden size, W columns (vocabulary rows) of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MIN_ROWS = 16
"""Minimum rows of a product. With fewer rows, a CPU's GEMM uses other kernels with other rounding in the last bit."""
# Number of rows and columns that are converted to float32 at a time. A limit keeps the copies small.
_WIDENED = 4096
_ROUNDED = 1024
"""Rows of a product that remain in a CPU's caches until they are added."""


# Supported dtypes and row alignment (bytes) of torch's `grouped_mm` in forward and backward.
_GROUPED_TYPES = (torch.bfloat16, torch.float32)
_GROUPED_ROW_BYTES = 16


def takes_grouped(dtype: torch.dtype, *widths: int) -> bool:
    """Return whether torch's grouped product accepts matrices of these widths, in forward and backward."""
    return dtype in _GROUPED_TYPES and all(width * dtype.itemsize % _GROUPED_ROW_BYTES == 0 for width in widths)


class LogitsGemm:
    """float32 logits of one block of rows and slices of the output matrix, in reused buffers.

    With bfloat16 inputs on a CPU, torch's GEMM returns bfloat16. With `exact`, the product is computed in float32,
    where products of bfloat16 numbers are exact. Without `exact`, the logits are rounded, at about 2.4 times the
    speed on a CPU with bfloat16 instructions. On CUDA, the float32 accumulators are returned without rounding.
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
        """Write the logits to `out_CW`, which has `padded_rows` rows. Returns `out_CW`."""
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
        """Return (C, W) logits in a buffer that the next call overwrites."""
        if not len(self._buffer):
            self._buffer = torch.empty(self._size, dtype=self._dtype, device=weight_WH.device)
        shape = (self.padded_rows, len(weight_WH))
        return self.into(weight_WH, self._buffer[: shape[0] * shape[1]].view(shape))[: self.rows]


@contextmanager
def bf16_valued_inputs() -> Iterator[None]:
    """Allow oneDNN to read float32 matrices as bfloat16. The products are exact for bfloat16 values, and fast with
    AMX."""
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    previous = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = previous


def add_product(total: Tensor, left: Tensor, right: Tensor, *, rounds: bool = False) -> None:
    """Add left @ right to `total`, with all products and sums in the precision of `total`.

    With `rounds`, a CPU rounds the product of bfloat16 matrices to bfloat16 before the addition, which takes a
    quarter to half of the time. Use `rounds` for results that are rounded anyway. Examples are the gradient of a
    weight, as in every other layer, and a sum with a single product that is returned in bfloat16.
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
    """Return slices of 0:n. Their float32 copies are small."""
    return [slice(start, start + _WIDENED) for start in range(0, n, _WIDENED)]
