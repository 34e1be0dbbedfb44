"""Triton kernel for 64-bit checksums of the tiles of a tensor, equal to SGLang's checksums of weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 256, 4
TILE = 8192
"""Words of a tile. Each tile has a separate 64-bit value, so the checksum depends on the tile size."""

# The remaining code follows SGLang 0.5.23, kernels/ops/memory/gpu_tensor_hash.py: MurmurHash3's finalizer, primes of
# xxHash for positions, and two seeds.
_MIX_1, _MIX_2 = tl.constexpr(0x85EBCA6B), tl.constexpr(0xC2B2AE35)
_POSITION_1, _POSITION_2 = tl.constexpr(0x27D4EB2D), tl.constexpr(0x165667B1)
_SEED_1 = tl.constexpr(0x243F6A88)
_SEED_2 = tl.constexpr(0x243F6A88 * 0x9E3779B1 & 0xFFFFFFFF ^ 0xDEADBEEF)


@triton.jit
def mixed(x):
    """Apply MurmurHash3's finalizer to uint32."""
    x ^= x >> 16
    x *= tl.full((), _MIX_1, tl.uint32)
    x ^= x >> 13
    x *= tl.full((), _MIX_2, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def mixed_word(word, position, FACTOR: tl.constexpr, SEED: tl.constexpr, TURN: tl.constexpr):
    """Mix a word with its position, both uint32."""
    place = position * tl.full((), FACTOR, tl.uint32) + tl.full((), SEED, tl.uint32)
    return mixed(word ^ place ^ ((position << TURN) | (position >> (32 - TURN))))


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["integers"])
def checksum_kernel(integers, partials, n, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Compute 64 bits for each tile of int32 `integers`, and store them in int64 `partials`."""
    high, low = tl.zeros([BLOCK], tl.uint32), tl.zeros([BLOCK], tl.uint32)
    for start in range(0, TILE, BLOCK):
        positions = tl.program_id(0).to(tl.int64) * TILE + start + tl.arange(0, BLOCK)
        inside = positions < n
        word = tl.load(integers + positions, mask=inside, other=0).to(tl.uint32)
        position = positions.to(tl.uint32)
        nothing = tl.zeros([BLOCK], tl.uint32)
        high += tl.where(inside, mixed_word(word, position, _POSITION_1, _SEED_1, 15), nothing)
        low += tl.where(inside, mixed_word(word, position, _POSITION_2, _SEED_2, 13), nothing)
    n_bytes = (n.to(tl.int64) * 4).to(tl.uint32)
    first, second = mixed(tl.sum(high, 0) ^ n_bytes), mixed(tl.sum(low, 0) ^ n_bytes)
    tl.store(partials + tl.program_id(0), ((first.to(tl.uint64) << 32) | second.to(tl.uint64)).to(tl.int64))


def launch_checksums(integers: Tensor) -> Tensor:
    """Return 64 bits for each tile of int32 (words,), as int64 (tiles,)."""
    tiles = triton.cdiv(integers.numel(), TILE)
    partials = torch.empty(tiles, dtype=torch.int64, device=integers.device)
    if tiles:
        checksum_kernel[(tiles,)](integers, partials, integers.numel(), BLOCK=BLOCK, TILE=TILE, num_warps=WARPS)
    return partials


def tensor_checksum(tensor: Tensor) -> int:
    """Return the 64-bit checksum of a tensor's bytes, equal to `gpu_tensor_hash` of SGLang 0.5.23. An empty tensor
    has the checksum 0.

    The function synchronises with the device. An import of SGLang's own function would import all of SGLang, which
    takes two to seven CPU seconds.
    """
    content = tensor.contiguous().view(-1).view(torch.uint8)
    content = torch.nn.functional.pad(content, (0, -content.numel() % 4))
    return _mixed_64(int(launch_checksums(content.view(torch.int32)).sum()) & _WORD_64)


_WORD_64 = (1 << 64) - 1


def _mixed_64(x: int) -> int:
    """Apply SplitMix64's finalizer."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD_64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD_64
    return x ^ x >> 31
