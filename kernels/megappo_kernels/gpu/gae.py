"""Triton kernel for GAE as an associative scan of affine maps. One program processes one sequence in blocks, from
the end.

A token maps (n, g) to (a n + b, c g + d n + e) with a = 1-m, b = m v, c = 1-m + m gamma lam, d = m gamma and e = m
(r - v). A masked token, or a token outside the sequence, is the identity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# With this size, no chip of `aot` spills registers.
BLOCK, WARPS = 1024, 4


@triton.jit
def compose(a1, b1, c1, d1, e1, a2, b2, c2, d2, e2):
    """Compose two maps: first the map of the tokens on the right (1), then the map of the tokens on the left (2)."""
    return a2 * a1, a2 * b1 + b2, c2 * c1, c2 * d1 + d2 * a1, c2 * e1 + d2 * b1 + e2


@triton.jit(
    do_not_specialize=["length"],
    do_not_specialize_on_alignment=["rewards", "values", "mask", "borders", "lam", "bootstrap", "advantages", "starts"],
)
def gae_kernel(
    rewards,
    values,
    mask,
    borders,
    lam,
    bootstrap,
    advantages,
    starts,
    length,
    gamma,
    PACKED: tl.constexpr,
    BORDERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the advantages of a sequence. Padded: sequence i is row i of (B, length). Packed: the tokens
    of sequence i begin at starts[i] and end before starts[i + 1]."""
    sequence = tl.program_id(0).to(tl.int64)
    if PACKED:
        first = tl.load(starts + sequence)
        length = (tl.load(starts + sequence + 1) - first).to(tl.int32)
    else:
        first = sequence * length
    decay = gamma * tl.load(lam + sequence)
    n0 = tl.load(bootstrap + sequence).to(tl.float32)
    g0 = n0 * 0
    lanes = tl.arange(0, BLOCK)
    for block in range(0, tl.cdiv(length, BLOCK)):
        positions = length - (block + 1) * BLOCK + lanes
        inside = positions >= 0
        m = tl.load(mask + first + positions, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(values + first + positions, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rewards + first + positions, mask=inside, other=0.0).to(tl.float32)
        reach, trace = m * gamma, m * decay
        if BORDERS:
            ends = tl.load(borders + first + positions, mask=inside, other=0) != 0
            reach, trace = tl.where(ends, reach, m), tl.where(ends, trace, m)
        a, b, c, d, e = tl.associative_scan((1 - m, m * v, 1 - m + trace, reach, m * (r - v)), 0, compose, reverse=True)
        n, g = a * n0 + b, c * g0 + d * n0 + e
        tl.store(advantages + first + positions, g, mask=inside)
        # The leftmost lane contains the result of the whole block.
        n0 = tl.sum(tl.where(lanes == 0, n, 0.0), 0)
        g0 = tl.sum(tl.where(lanes == 0, g, 0.0), 0)


def launch_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    borders: Tensor | None,
    gamma: float,
    lam_S: Tensor,
    bootstrap: Tensor,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Return advantages from cleaned rewards and values. Masked positions contain the running value."""
    advantages = torch.empty_like(values, memory_format=torch.contiguous_format)
    if not values.numel():
        return advantages
    gae_kernel[(len(bootstrap),)](
        rewards.contiguous(),
        values.contiguous(),
        (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).contiguous(),
        advantages if borders is None else borders.contiguous().view(torch.uint8),
        lam_S.float().contiguous(),
        bootstrap,
        advantages,
        cu_seqlens if cu_seqlens is not None else advantages,
        values.shape[-1],
        gamma,
        PACKED=cu_seqlens is not None,
        BORDERS=borders is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return advantages
