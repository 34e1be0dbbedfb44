"""Latent attention of a layer over packed segments. Keys and values of all heads are projected from one latent per
token.

The latent attention of Megatron-Core supports packs only with Transformer Engine. This implementation uses the same
core attention as all other families, so packs, context parallelism and recomputation work in the same way.

With sequence parallelism, each rank computes the latents and the shared rotated key of its own tokens. These are
gathered in one collective and multiplied by the rows of each rank's heads.

Values have fewer channels than queries and keys. No kernel for packs supports different widths, so values are padded
with zeros.

Shape legend: t tokens of a pack, l tokens on this tensor rank (fewer than t only with sequence parallelism); H hidden
size; h heads of this rank; d channels of a query and key, r rotated channels, v channels of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from megappo.families.architecture import LATENT_NORM_EPS, LatentAttention
from megappo.megatron.layers.attention import PackedCoreAttention, RMSNorm
from megappo.megatron.layers.parallel import new_weight, parallel_settings, whole_input
from megappo.megatron.segments import PackedSegments
from megappo_kernels.layers import rotate_pairs

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


class DownProjection(nn.Module):
    """Projection of hidden states to latents, replicated on every tensor parallel rank."""

    def __init__(self, config: TransformerConfig, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(new_weight(config, outputs, config.hidden_size))
        # With sequence parallelism, each rank has the gradient of its own tokens. The attribute makes Megatron sum the
        # gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Project (..., H) to (..., outputs)."""
        return linear(hidden_states, self.weight)


class LatentSelfAttention(MegatronModule):
    """Replacement for `self_attention` of Megatron's layer, with the arguments that Megatron passes."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        shape: LatentAttention,
        pg_collection: ProcessGroupCollection,
        **_of_megatron: Any,
    ) -> None:
        super().__init__(config=config)
        self.shape, self.group = shape, pg_collection.tp
        heads, hidden, rank = config.num_attention_heads, config.hidden_size, shape.query_rank
        self.heads, self.head_dim = heads // self.group.size(), shape.plain_dim + shape.rotary_dim
        of_columns, of_rows = parallel_settings(config, self.group)
        self.linear_down_proj = DownProjection(config, (rank or 0) + shape.token_width)
        self.kv_layernorm = RMSNorm(config, shape.rank, eps=LATENT_NORM_EPS)
        self.linear_kv_up_proj = ColumnParallelLinear(shape.rank, heads * shape.made_dim, **of_columns)
        self.linear_kv_up_proj.explicit_expert_comm = True  # `forward` gathers the input
        if rank is None:
            self.linear_q_proj = ColumnParallelLinear(hidden, heads * self.head_dim, **of_columns)
        else:
            self.q_layernorm = RMSNorm(config, rank, eps=LATENT_NORM_EPS)
            self.linear_q_up_proj = ColumnParallelLinear(rank, heads * self.head_dim, **of_columns)
            self.linear_q_up_proj.explicit_expert_comm = True
        self.core_attention = PackedCoreAttention(
            config, layer_number, None, "self", softmax_scale=config.softmax_scale, pg_collection=pg_collection
        )
        self.linear_proj = RowParallelLinear(heads * shape.value_dim, hidden, **of_rows)
        self.attends_again = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(
        self,
        hidden_states: Tensor,
        *_of_attention: Tensor | None,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSegments,
        **_more: Any,
    ) -> tuple[Tensor, None]:
        """Return [l, 1, H] for hidden states [l, 1, H] with cosine and sine (2, t, 1, r). There is no bias."""
        shape, rank = self.shape, self.shape.query_rank
        down = self.linear_down_proj(hidden_states)
        of_query, latent, shared_key = down.split([rank or 0, shape.rank, shape.rotary_dim], dim=-1)
        parts = [self.kv_layernorm(latent), shared_key]
        if rank is not None:
            parts.append(self.q_layernorm(of_query))
        is_part = self.config.sequence_parallel
        whole = whole_input(torch.cat(parts, dim=-1), self.group, sequence_parallel=is_part)
        latent, shared_key, *of_query_too = whole.split([part.shape[-1] for part in parts], dim=-1)
        query, _ = self.linear_q_up_proj(of_query_too[0]) if of_query_too else self.linear_q_proj(hidden_states)
        made, _ = self.linear_kv_up_proj(latent)
        plain, turned = query.view(-1, self.heads, self.head_dim).split([shape.plain_dim, shape.rotary_dim], dim=-1)
        cosine, sine = rotary_pos_emb
        query = torch.cat([plain, self._rotated(turned, cosine, sine)], dim=-1)
        plain, value = made.view(-1, self.heads, shape.made_dim).split([shape.plain_dim, shape.value_dim], dim=-1)
        key = torch.cat([plain, self._rotated(shared_key, cosine, sine).expand(-1, self.heads, -1)], dim=-1)
        read = self._attend(query, key, pad(value, (0, self.head_dim - shape.value_dim)), packed_seq_params)
        read = read.unflatten(-1, (self.heads, self.head_dim))[..., : shape.value_dim]
        output, _ = self.linear_proj(read.flatten(1)[:, None])
        return output, None

    def _rotated(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Rotate (t, heads, r). Interleaved channels of queries and keys are reordered in the same way first, which
        does not change the products."""
        if self.shape.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate_pairs(x, cosine, sine)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments) -> Tensor:
        """Return the core attention of (t, h, d) queries, keys and values as (t, h d). The settings determine whether
        the backward pass recomputes the core attention."""
        core: Callable[..., Tensor] = self.core_attention
        attend = partial(core, attention_mask=None, packed_seq_params=segments)
        heads = (query, key, value)
        output: Tensor = checkpoint(attend, False, *heads) if self.attends_again else attend(*heads)
        return output
