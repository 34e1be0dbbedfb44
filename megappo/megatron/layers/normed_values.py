"""Attention with normed values, as in Gemma 4. Some layers have wider heads and use their keys as values.

Shape legend: t tokens of a pack, H hidden size; h query heads and g key/value heads of this rank, d channels of each
head.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import rms_norm

from megappo.families.architecture import WideAttention


class QueriesAndKeys(ColumnParallelLinear):
    """Replacement for `linear_qkv` without the rows for values, which Megatron requests."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **of_megatron: Any) -> None:
        assert config.kv_channels is not None and config.num_query_groups is not None
        of_values = config.kv_channels * config.num_query_groups
        super().__init__(input_size, output_size - of_values, config=config, **of_megatron)


class NormedValueSelfAttention(SelfAttention):
    """Replacement for `self_attention` of Megatron's layer, with the arguments that Megatron passes. `wide` contains
    the sizes of the layer's heads if they differ from the model's sizes."""

    def __init__(self, config: TransformerConfig, *, wide: WideAttention | None = None, **of_megatron: Any) -> None:
        if wide is not None:
            config = copy.copy(config)  # the configuration of the model is already validated
            config.kv_channels, config.num_query_groups = wide.head_dim, wide.kv_heads
        self.keys_are_values = wide is not None
        super().__init__(config=config, **of_megatron)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_of_megatron: Tensor | None, **_more: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project [t, 1, H] to queries [t, 1, h, d] and to keys and values [t, 1, g, d]."""
        mixed, _ = self.linear_qkv(hidden_states)
        d, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        of_groups = mixed.unflatten(-1, (groups, -1))
        others = [d] if self.keys_are_values else [d, d]
        queries, key, *values = of_groups.split([of_groups.shape[-1] - sum(others), *others], dim=-1)
        value = values[0] if values else key
        normed = rms_norm(value.float(), (d,), eps=self.config.layernorm_epsilon).to(value.dtype)
        query = queries.unflatten(-1, (-1, d)).flatten(2, 3)
        return self.q_layernorm(query), self.k_layernorm(key), normed


def normed_values(layer: ModuleSpec, wide: WideAttention | None) -> None:
    """Put `NormedValueSelfAttention` into the spec of a layer."""
    attention = layer.submodules.self_attention
    attention.module = NormedValueSelfAttention
    if wide is not None:
        attention.params = {**attention.params, "wide": wide}
        attention.submodules.linear_qkv = QueriesAndKeys
