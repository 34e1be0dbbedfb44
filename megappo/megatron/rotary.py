"""Rotary positions of a packed microbatch.

Megatron's own rotation of packed sequences reads the segments' lengths on the host, twice for queries and twice for
keys of every layer, and computes cosine and sine anew each time. Here they are computed once per microbatch, for the
positions that the pack brings along.
Shape legend: t tokens of a packed microbatch, h heads, d channels; kinds of rope that a model's layers have may differ
in d.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megappo.megatron.attention import PackedSegments
from megappo_kernels.layers import rotate_pairs


class PackedRotary(nn.Module):
    """Stands at GPTModel's `rotary_pos_emb`, with the two methods that GPTModel calls."""

    def __init__(self, inverse_frequencies: Sequence[Tensor]) -> None:
        """`inverse_frequencies`: (d/2,) float32 of each kind, on the model's device."""
        super().__init__()
        self.inverse_frequencies = inverse_frequencies

    def get_rotary_seq_len(
        self, _context: Any, _decoder: Any, _input: Any, _config: Any, packed_seq_params: PackedSegments
    ) -> Tensor:
        """What GPTModel hands to `forward`: not a length but the position of every token, (t,)."""
        return packed_seq_params.positions

    def forward(self, positions: Tensor, *, packed_seq: bool, cp_group: Any) -> Tensor:
        """(t,) -> (2, t, 1, d), cosine and sine, in one tensor, as Megatron takes a pair for queries and keys; in
        float32, as SGLang has them. Of several kinds of rope, those of all behind one another, flat, of which `of_kind`
        gives those of one."""
        kinds = [self._cosine_sine(positions.float(), frequencies) for frequencies in self.inverse_frequencies]
        return kinds[0] if len(kinds) == 1 else torch.cat([kind.flatten() for kind in kinds])

    def of_kind(self, number: int, flat: Tensor) -> Tensor:
        """(2, t, 1, d) of the kind with this number."""
        channels = [2 * len(frequencies) for frequencies in self.inverse_frequencies]
        tokens = len(flat) // (2 * sum(channels))
        kind = flat.split([2 * tokens * d for d in channels])[number]
        return kind.view(2, tokens, 1, channels[number])

    def _cosine_sine(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        angles = positions[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, _cu_seqlens: Tensor, cosine_sine: Tensor, **_of_context_parallelism: Any) -> Tensor:
    """Rotate each pair of channels i and i + r/2 of the first r of (t, h, d) by its token's angles, (2, t, 1, r)."""
    cosine, sine = cosine_sine
    rotated = cosine.shape[-1]
    if rotated == x.shape[-1]:
        return rotate_pairs(x, cosine, sine)
    first, rest = x.split([rotated, x.shape[-1] - rotated], dim=-1)
    return torch.cat([rotate_pairs(first, cosine, sine), rest], dim=-1)
