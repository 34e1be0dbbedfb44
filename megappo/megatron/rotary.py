"""Rotary positions of a packed microbatch.

Megatron's own rotation of packed sequences reads the segments' lengths on the host, twice for queries and twice for
keys of every layer, and computes cosine and sine anew each time. Here they are computed once per microbatch, for the
positions that the pack brings along.
Shape legend: t tokens of a packed microbatch, h heads, d channels, k kinds of rope that a model's layers have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megappo.megatron.attention import PackedSegments
from megappo_kernels.layers import rotate_pairs


class PackedRotary(nn.Module):
    """Stands at GPTModel's `rotary_pos_emb`, with the two methods that GPTModel calls."""

    def __init__(self, inverse_frequencies: Tensor, dtype: torch.dtype) -> None:
        """`inverse_frequencies`: (k, d/2) float32, on the model's device; `dtype`: of the activations."""
        super().__init__()
        self.inverse_frequencies, self.dtype = inverse_frequencies, dtype

    def get_rotary_seq_len(
        self, _context: Any, _decoder: Any, _input: Any, _config: Any, packed_seq_params: PackedSegments
    ) -> Tensor:
        """What GPTModel hands to `forward`: not a length but the position of every token, (t,)."""
        return packed_seq_params.positions

    def forward(self, positions: Tensor, *, packed_seq: bool, cp_group: Any) -> Tensor:
        """(t,) -> (2k, t, 1, d): cosine and sine of each kind of rope, in one tensor, as Megatron takes a pair for
        queries and keys."""
        angles = positions.float()[:, None] * self.inverse_frequencies[:, None]
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        return torch.stack((angles.cos(), angles.sin()), dim=1).flatten(0, 1).to(self.dtype)


def rotate(x: Tensor, _cu_seqlens: Tensor, cosine_sine: Tensor, **_of_context_parallelism: Any) -> Tensor:
    """Rotate each pair of channels i and i + r/2 of the first r of (t, h, d) by its token's angles, (2, t, 1, r)."""
    cosine, sine = cosine_sine
    rotated = cosine.shape[-1]
    if rotated == x.shape[-1]:
        return rotate_pairs(x, cosine, sine)
    first, rest = x.split([rotated, x.shape[-1] - rotated], dim=-1)
    return torch.cat([rotate_pairs(first, cosine, sine), rest], dim=-1)
