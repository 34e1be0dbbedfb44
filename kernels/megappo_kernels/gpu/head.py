"""Triton kernel for the output layer: a GEMM with softmax statistics from the float32 accumulators. Logits are not
stored.

Persistent programs process units of (128 rows, 2,048 columns). 16 tiles of rows stay in L2 and share each part of
the weight before the next part is read. Units depend only on the vocabulary, and the kernel uses no atomics. The
result of a row is therefore bitwise equal in any batch and in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megappo_kernels.gpu.rows import shift_to, soft_cap
from megappo_kernels.rows import merge_parts

if TYPE_CHECKING:
    from megappo_kernels.rows import Scaling

# 16 tiles of 128 rows of hidden states have 17 MB in bfloat16 at a width of 4,096, which fit in L2.
SPLIT_COLUMNS = 2048
GROUP_M = 16


@dataclass(frozen=True)
class Tile:
    """Tile sizes and launch options of the kernel for one GPU generation."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    descriptors: bool
    """Whether TMA loads the operands. Otherwise, pointers and asynchronous copies are used."""


TILES = {
    80: Tile(128, 128, 32, stages=4, warps=8, descriptors=False),
    90: Tile(128, 256, 64, stages=3, warps=8, descriptors=True),
    100: Tile(128, 128, 64, stages=4, warps=8, descriptors=True),
    120: Tile(128, 128, 32, stages=4, warps=8, descriptors=False),
}
"""Tiles by minimum compute capability. With these tiles, no chip spills registers, and shared memory suffices (8.6,
8.9 and 12 have the least). The tiles are not tuned by measurements. On an H100, the head takes 1.16 times the time
of the product (benchmarks/results/2026-11-23-h100.md)."""


@triton.jit
def load_tile(matrix, row, column, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Load a block of a contiguous matrix, with zeros outside the matrix, like a descriptor."""
    i = row + tl.arange(0, BLOCK_ROWS)
    j = column + tl.arange(0, BLOCK_COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(matrix + i.to(tl.int64)[:, None] * columns + j[None, :], mask=inside, other=0.0)


@triton.jit
def tile_logits(
    hidden,
    weight,
    row,
    column,
    rows,
    columns,
    features,
    DESCRIPTORS: tl.constexpr,
    WIDEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute the float32 logits of a tile."""
    z = tl.zeros((BM, BN), tl.float32)
    for k in range(0, features, BK):
        if DESCRIPTORS:
            a = hidden.load([row, k])
            b = weight.load([column, k])
        else:
            a = load_tile(hidden, row, k, rows, features, BM, BK)
            b = load_tile(weight, column, k, columns, features, BN, BK)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        z = tl.dot(a, b.T, z, input_precision="ieee")
    return z


@triton.jit
def merge_tile(z, m, s, u, ENTROPY: tl.constexpr):
    """Merge a tile into the statistics of the rows, in units of log 2."""
    new = tl.maximum(m, tl.max(z, 1))
    shift = shift_to(new, m)
    scale = tl.exp2(shift)
    z = z - new[:, None]
    e = tl.exp2(z)
    if ENTROPY:
        u = (u + shift * s) * scale + tl.sum(tl.where(e > 0, e * z, 0.0), 1)
    return new, s * scale + tl.sum(e, 1), u


# Specialisation for a multiple of 16 columns is not faster in this kernel, and spills registers on sm_100.
_ANY_SIZE = ["rows", "columns", "units", "splits", "row_tiles"]
_PER_ROW = ["labels", "inverse_temperatures"]


@triton.jit(do_not_specialize=_ANY_SIZE, do_not_specialize_on_alignment=_PER_ROW)
def fused_kernel(
    hidden,
    weight,
    labels,
    inverse_temperatures,
    inverse_temperature,
    cap,
    stats,
    rows,
    columns,
    features,
    units,
    splits,
    row_tiles,
    PER_ROW: tl.constexpr,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WIDEN: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute stats[split, 4, rows]. `hidden` and `weight` are tensor descriptors, or pointers to contiguous rows."""
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        group = unit // (GROUP * splits)
        inside_group = unit - group * GROUP * splits
        group_tiles = min(row_tiles - group * GROUP, GROUP)
        row_tile = group * GROUP + inside_group % group_tiles
        split = inside_group // group_tiles
        lanes = row_tile * BM + tl.arange(0, BM)
        valid_rows = lanes < rows
        label = tl.load(labels + lanes, mask=valid_rows, other=-1)
        factor = tl.full((BM,), inverse_temperature, tl.float32)
        if PER_ROW:
            factor = tl.load(inverse_temperatures + lanes, mask=valid_rows, other=1.0)
        # Logits are in units of log 2, because the hardware has an instruction for exp2.
        m = tl.full((BM,), -float("inf"), tl.float32)
        s = tl.zeros((BM,), tl.float32)
        u = tl.zeros((BM,), tl.float32)
        t = tl.full((BM,), -float("inf"), tl.float32)
        for tile in range(split * TILES, min((split + 1) * TILES, tl.cdiv(columns, BN))):
            z = tile_logits(
                hidden, weight, row_tile * BM, tile * BN, rows, columns, features, DESCRIPTORS, WIDEN, BM, BN, BK
            )
            if CAPPED:
                z = soft_cap(z, cap)
            z = z * (factor * LOG2E)[:, None]
            offsets = tile * BN + tl.arange(0, BN)
            if (tile + 1) * BN > columns:
                z = tl.where((offsets < columns)[None, :], z, -float("inf"))
            local = label - tile * BN
            if tl.max(((local >= 0) & (local < BN)).to(tl.int32), 0) > 0:
                hit = tl.where(offsets[None, :] == label[:, None], z, -float("inf"))
                t = tl.maximum(t, tl.max(hit, 1))
            m, s, u = merge_tile(z, m, s, u, ENTROPY)
        base = stats + split.to(tl.int64) * 4 * rows + lanes
        tl.store(base, m * LN2, mask=valid_rows)
        tl.store(base + rows, s, mask=valid_rows)
        tl.store(base + 2 * rows, u * LN2, mask=valid_rows)
        tl.store(base + 3 * rows, t * LN2, mask=valid_rows)


def can_fuse(hidden_TH: Tensor, weight_VH: Tensor) -> bool:
    """Return whether tensor cores compute exact products of these types, and rows allow 16-byte loads."""
    return all(
        x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() > 0
        and x.is_contiguous()
        and x.shape[1] * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
        for x in (hidden_TH, weight_VH)
    )


def tile_for(capability: int) -> Tile:
    """Return the tile of the newest known generation that is not newer than `capability`, such as 90 for 9.0."""
    return TILES[max((c for c in TILES if c <= capability), default=min(TILES))]


def launch_fused(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, scaling: Scaling, *, entropy: bool) -> Tensor:
    """Return (4, T) statistics over the rows of `weight_VH`, float32."""
    rows, features, columns = len(hidden_TH), hidden_TH.shape[1], len(weight_VH)
    tile, programs = _tile_and_programs(hidden_TH)
    row_tiles, splits = triton.cdiv(rows, tile.m), triton.cdiv(columns, SPLIT_COLUMNS)
    stats_S4T = torch.empty(splits, 4, rows, dtype=torch.float32, device=hidden_TH.device)
    per_row = isinstance(scaling.inverse_temperature, Tensor)
    operands: tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor] = (hidden_TH, weight_VH)
    if tile.descriptors:
        operands = (
            TensorDescriptor.from_tensor(hidden_TH, [tile.m, tile.k]),
            TensorDescriptor.from_tensor(weight_VH, [tile.n, tile.k]),
        )
    fused_kernel[(min(row_tiles * splits, programs),)](
        *operands,
        labels_T.contiguous(),
        scaling.inverse_temperature if per_row else stats_S4T,
        1.0 if per_row else scaling.inverse_temperature,
        scaling.softcap or 1.0,
        stats_S4T,
        rows,
        columns,
        features,
        row_tiles * splits,
        splits,
        row_tiles,
        PER_ROW=per_row,
        CAPPED=scaling.softcap is not None,
        ENTROPY=entropy,
        DESCRIPTORS=tile.descriptors,
        WIDEN=not hidden_TH.is_cuda,  # the interpreter multiplies bfloat16 as integers
        TILES=SPLIT_COLUMNS // tile.n,
        GROUP=GROUP_M,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return merge_parts(stats_S4T)


def _tile_and_programs(tensor: Tensor) -> tuple[Tile, int]:
    """Return the tile for this device, and the number of persistent programs."""
    if not tensor.is_cuda:
        return tile_for(90), 4
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return tile_for(10 * major + minor), torch.cuda.get_device_properties(tensor.device).multi_processor_count
