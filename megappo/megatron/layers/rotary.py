"""Rotary positions of a packed microbatch.

Megatron's rotation of packed sequences reads the lengths of segments on the host, twice for queries and twice for keys
of every layer. It also recomputes cosine and sine each time. Here, cosine and sine are computed once per microbatch
for the positions in the pack.

Shape legend: t tokens of a packed microbatch, h heads, d channels. Kinds of rope of a model may differ in d.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megappo.families.rope import Rope
from megappo.megatron.segments import PackedSegments
from megappo_kernels.layers import rotate_pairs

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig


class PackedRotary(nn.Module):
    """Replacement for `rotary_pos_emb` of GPTModel, with the two methods that GPTModel calls."""

    def __init__(self, ropes: Sequence[Rope]) -> None:
        """Create the module. `ropes` has one rope for each kind of layer, with frequencies on the device of
        the model."""
        super().__init__()
        self.ropes = ropes

    def get_rotary_seq_len(
        self,
        _context: None,
        _decoder: TransformerBlock,
        _input: Tensor,
        _config: TransformerConfig,
        packed_seq_params: PackedSegments,
    ) -> Tensor:
        """Return the input of `forward`, which GPTModel passes on: the positions of all tokens, (t,), instead of a
        length."""
        return packed_seq_params.positions

    def forward(self, positions: Tensor, *, packed_seq: bool, cp_group: dist.ProcessGroup) -> Tensor:
        """Return scaled cosine and sine in float32 for positions (t,), as (2, t, 1, d). Servers compute the same
        values.

        The result is one tensor, because Megatron would interpret a pair as values for queries and keys. Several kinds
        of rope are flattened and concatenated. `of_kind` selects one of them.
        """
        kinds = [self._cosine_sine(positions.float(), rope) for rope in self.ropes]
        return kinds[0] if len(kinds) == 1 else torch.cat([kind.flatten() for kind in kinds])

    def of_kind(self, number: int, flat: Tensor) -> Tensor:
        """Return cosine and sine of the kind with the index `number`, (2, t, 1, d)."""
        channels = [2 * len(rope.inverse_frequencies) for rope in self.ropes]
        tokens = len(flat) // (2 * sum(channels))
        kind = flat.split([2 * tokens * d for d in channels])[number]
        return kind.view(2, tokens, 1, channels[number])

    def _cosine_sine(self, positions: Tensor, rope: Rope) -> Tensor:
        angles = positions[:, None] * rope.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cosine_sine = torch.stack((angles.cos(), angles.sin()))
        return cosine_sine if rope.scale == 1 else cosine_sine * rope.scale


def rotate(x: Tensor, _cu_seqlens: Tensor, cosine_sine: Tensor, **_of_context_parallelism: int) -> Tensor:
    """Rotate channels i and i + r/2, for i < r/2, of (t, h, d) by the angles of the token, (2, t, 1, r). The other
    channels are unchanged."""
    cosine, sine = cosine_sine
    rotated = cosine.shape[-1]
    if rotated == x.shape[-1]:
        return rotate_pairs(x, cosine, sine)
    first, rest = x.split([rotated, x.shape[-1] - rotated], dim=-1)
    return torch.cat([rotate_pairs(first, cosine, sine), rest], dim=-1)
