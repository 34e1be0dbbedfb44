"""Gated delta net of a layer: linear attention over packed segments as a replacement for attention.

The gated delta net of Megatron-Core needs a library of kernels and does not support packs. This implementation uses
torch operations on every device. Tensor parallel ranks split the key heads together with their value heads. The
weights of one key head are contiguous (`grouped` of families), so the shard of a rank is a model with fewer heads.

Shape legend: t tokens of a pack, H hidden size; g key heads of this rank, r value heads of each key head, k and v
channels of a key and of a value.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from megappo.families.architecture import DeltaNet
from megappo.megatron.layers.delta_rule import causal_convolution, decays, gated_delta_rule, wide
from megappo.megatron.layers.parallel import new_weight, parallel_settings, whole_input
from megappo.megatron.segments import Chunks, PackedSegments

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


class GatedDeltaNet(MegatronModule):
    """Replacement for `self_attention` of Megatron's layer, with the arguments that Megatron passes."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        shape: DeltaNet,
        pg_collection: ProcessGroupCollection,
        **_of_megatron: Any,
    ) -> None:
        super().__init__(config=config)
        self.shape, self.group = shape, pg_collection.tp
        tp = self.group.size()
        self.groups, self.ratio = shape.key_heads // tp, shape.value_heads // shape.key_heads
        of_columns, of_rows = parallel_settings(config, self.group)
        self.in_proj = ColumnParallelLinear(config.hidden_size, 2 * (shape.key_width + shape.value_width), **of_columns)
        self.gates_proj = ColumnParallelLinear(config.hidden_size, 2 * shape.value_heads, **of_columns)
        for linear in (self.in_proj, self.gates_proj):
            linear.explicit_expert_comm = True  # `forward` gathers their common input once
        self.out_proj = RowParallelLinear(shape.value_width, config.hidden_size, **of_rows)
        made = partial(new_weight, config)
        channels, heads = (2 * shape.key_width + shape.value_width) // tp, shape.value_heads // tp
        self.conv_weight = nn.Parameter(made(channels, 1, shape.conv_width))
        self.log_rate, self.rate_bias = (nn.Parameter(made(heads)) for _ in range(2))
        self.norm_weight = nn.Parameter(made(shape.value_dim))

    def forward(
        self, hidden_states: Tensor, *_of_attention: Tensor | None, packed_seq_params: PackedSegments, **_more: Any
    ) -> tuple[Tensor, None]:
        """Return [t, 1, H] for hidden states [t, 1, H], or a part of both on a sequence parallel rank. There is no
        bias."""
        assert isinstance(packed_seq_params, PackedSegments)
        shape, segments = self.shape, packed_seq_params
        hidden_states = whole_input(hidden_states, self.group, sequence_parallel=self.config.sequence_parallel)
        of_value = self.ratio * shape.value_dim
        of_groups = self.in_proj(hidden_states)[0].view(-1, self.groups, 2 * shape.key_dim + 2 * of_value)
        mixed, gate = of_groups.split([2 * shape.key_dim + of_value, of_value], dim=-1)
        strength, rate = self.gates_proj(hidden_states)[0].view(-1, self.groups, 2, self.ratio).unbind(2)
        mixed = silu(causal_convolution(mixed.flatten(1), self.conv_weight, segments)).unflatten(1, (self.groups, -1))
        query, key, value = mixed.split([shape.key_dim, shape.key_dim, of_value], dim=-1)
        decay = decays(rate.flatten(1), self.log_rate, self.rate_bias).unflatten(1, (self.groups, -1))
        if segments.recurrence is None:
            segments.recurrence = Chunks.of(segments)
        of_heads = (self.groups, self.ratio, shape.value_dim)
        read = gated_delta_rule(
            query, key, value.unflatten(-1, of_heads[1:]), decay, strength.sigmoid(), segments.recurrence
        )
        normed = self._gated_norm(read, gate.unflatten(-1, of_heads[1:]))
        output, _ = self.out_proj(normed.flatten(1)[:, None])
        return output, None

    def _gated_norm(self, read: Tensor, gate: Tensor) -> Tensor:
        """Return the RMS norm over each head's channels, times silu of the gate. Tensor ranks have different heads and
        share the weight."""
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.group)
        normed = rms_norm(wide(read), read.shape[-1:], eps=self.config.layernorm_epsilon).to(read.dtype)
        return (weight * normed * silu(wide(gate))).to(read.dtype)


class GatedSelfAttention(SelfAttention):
    """Attention with an output gate: the output is multiplied by the sigmoid of a gate. Each head's gate follows its
    query in the projection."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_of_megatron: Tensor | None, **_more: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project [t, 1, H] to queries, keys, values and gates, [t, 1, heads, d] each."""
        mixed, _ = self.linear_qkv(hidden_states)
        d, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        of_groups = mixed.unflatten(-1, (groups, -1))
        queries, key, value = of_groups.split([of_groups.shape[-1] - 2 * d, d, d], dim=-1)
        query, gate = queries.unflatten(-1, (-1, 2, d)).flatten(2, 3).unbind(3)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply by the gate in eager mode. Megatron's version is compiled by torch."""
        return x * torch.sigmoid(gate.flatten(2))
