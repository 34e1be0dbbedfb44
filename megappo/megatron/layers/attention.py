"""Core attention and norm for machines without Transformer Engine.

Megatron's local attention does not support packed sequences (0.16.1 and 0.19.2, dot_product_attention.py:153) and
builds an S x S mask. Its local norm does not support sequence parallelism. The replacements in this module fit
Megatron's layer spec.

Shape legend: t tokens of a packed microbatch, h query heads, g key/value heads of this rank, d channels, S segments, L
longest segment.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from megappo.families.architecture import PRODUCT_ROWS
from megappo.megatron.context import gather_keys_values
from megappo.megatron.layers.parallel import new_weight
from megappo.megatron.layers.short_attention import attend_short, takes_products
from megappo.megatron.segments import PackedSegments
from megappo_kernels.layers import rms_norm as row_norm

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType


# In torch 2.11, grouped queries need no argument.
_ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


@dataclass(frozen=True)
class Scores:
    """Transformation of attention scores before the softmax."""

    scale: float
    """Factor on the scores."""
    cap: float | None = None
    """Softcap of the scores, which maps a score to cap * tanh(score / cap); None without a cap."""
    sinks_h: Tensor | None = None
    """Learned logit of each head, (h,), which is an additional score of the softmax without a value. None without
    sinks."""

    @property
    def are_plain(self) -> bool:
        """Whether the attention of torch supports the scores, which is true without cap and sinks."""
        return self.cap is None and self.sinks_h is None


def _attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores, window: int | None) -> Tensor:
    """Return the causal attention of (b, heads, n, d) tensors. The last query attends to all keys. With a window, each
    token attends to the last `window` tokens.

    A long windowed sequence is computed in blocks of `window` queries, so no mask exceeds window x 2 window. Without a
    window, a later chunk of a segment uses one mask of all its queries x keys. The attention of torch does not support
    caps or sinks. Such scores are computed in blocks of at most `PRODUCT_ROWS` queries, and the backward pass
    recomputes them.
    """
    length, before = query.shape[-2], key.shape[-2] - query.shape[-2]
    plain, scale, grouped = scores.are_plain, scores.scale, query.shape[1] != key.shape[1]
    if plain and not before and (window is None or length <= window):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    blocks, window = [], key.shape[-2] if window is None else window
    step = window if plain else min(window, PRODUCT_ROWS)
    for start in range(before, before + length, step):
        stop, first = min(start + step, before + length), max(0, start - window + 1)
        rows = torch.arange(start, stop, device=query.device)[:, None]
        columns = torch.arange(first, stop, device=query.device)[None, :]
        mask = (columns <= rows) & (columns > rows - window)
        of_block = query[..., start - before : stop - before, :], key[..., first:stop, :], value[..., first:stop, :]
        if plain:
            block = scaled_dot_product_attention(*of_block, attn_mask=mask, scale=scale, enable_gqa=grouped)
        else:
            block = checkpoint(_by_products, *of_block, mask, scores, use_reentrant=False, preserve_rng_state=False)
        blocks.append(block)
    return torch.cat(blocks, dim=-2)


def _by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Return the attention by plain matrix products in float32. Fused kernels also keep scores in float32, and
    products in bfloat16 would round the scores."""
    grouped = query.unflatten(1, (key.shape[1], -1)).float()  # (b, g, h/g, n, d)
    logits = grouped @ key.unsqueeze(2).float().transpose(-1, -2) * scores.scale
    if scores.cap is not None:
        logits = scores.cap * torch.tanh(logits / scores.cap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if scores.sinks_h is None:
        shares = logits.softmax(-1)
    else:
        sinks = scores.sinks_h.float().view(*grouped.shape[1:3], 1, 1).expand(*logits.shape[:-1], 1)
        shares = torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]
    return (shares @ value.unsqueeze(2).float()).flatten(1, 2).to(query.dtype)


def takes_packs(dtype: torch.dtype, head_dim: int, capability: tuple[int, int] | None) -> bool:
    """Return whether the variable-length attention of torch supports heads of this type and size. This attention
    computes a whole pack in one call without padding.

    The flash kernels (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp) need Ampere or later. megappo
    does not support float16. `capability` is the compute capability of the GPU, or None on a CPU.
    """
    return capability is not None and capability >= (8, 0) and dtype == torch.bfloat16 and head_dim in range(8, 257, 8)


def attend_pack(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, *, scale: float, window: int | None
) -> Tensor:
    """Return the attention of all segments of a pack, computed in one call of torch's variable-length attention.

    Queries are (t, h, d), keys and values (t, g, d). With a window, each token attends to the last `window` tokens.
    """
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _ASKS_FOR_GROUPS else {}
    out = varlen.varlen_attn(
        query,
        key,
        value,
        segments.cu_seqlens_q,
        segments.cu_seqlens_kv,
        segments.max_seqlen_q,
        segments.max_seqlen_kv,
        scale=scale,
        # Numbers of visible tokens before and after each token. (-1, 0) selects the causal kernel.
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)  # no other outputs are requested
    return out


class PackedCoreAttention(MegatronModule):
    """Causal self-attention of packed segments.

    On a GPU that supports the type, torch's variable-length attention is used. Short bfloat16 segments on a CPU use
    plain products. Other cases use scaled_dot_product_attention of torch. The module is the `core_attention` of
    Megatron's layer spec, with the arguments that Megatron passes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType | None,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        scores_cap: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        super().__init__(config=config)
        self.scores_cap, self.sinks = scores_cap, None
        if has_sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = nn.Parameter(new_weight(config, heads).zero_())
        assert not config.attention_dropout, "PPO's ratio needs a policy without dropout"
        self.context_group: Any = None if pg_collection is None else pg_collection.cp
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if config.window_size is not None and has_window else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return (t, h*d) for queries (t,h,d), keys and values (t,g,d). With context parallelism, t is the number of
        this rank's tokens."""
        assert isinstance(packed_seq_params, PackedSegments)
        segments = packed_seq_params.chunks or packed_seq_params
        if segments.key_rows is not None:
            key, value = gather_keys_values(key, value, segments.key_rows, self.context_group)
        scores = Scores(self.scale, self.scores_cap, self.sinks)
        capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else None
        if scores.are_plain and takes_packs(query.dtype, query.shape[-1], capability):
            return attend_pack(query, key, value, segments, scale=self.scale, window=self.window).flatten(1)
        lengths, key_lengths = segments.lengths, segments.key_lengths
        if segments.key_rows is None and scores.are_plain and takes_products(query, lengths, self.window):
            return attend_short(query, key, value, lengths, self.scale).flatten(1)
        if segments.slots is not None:
            return self._attend_rectangle(query, key, value, segments, scores)
        outputs = []
        for q, k, v in zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths), strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            outputs.append(_attend(q, k, v, scores, self.window).squeeze(0).transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _attend_rectangle(
        self, query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
    ) -> Tensor:
        """Attend all segments in one call with padding on the right. The causal mask hides the padding from all real
        tokens."""
        count, longest, slots = len(segments.lengths), max(segments.lengths), segments.slots
        assert slots is not None

        def rectangle(x: Tensor) -> Tensor:
            padded = x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, slots, x)
            return padded.view(count, longest, *x.shape[1:]).transpose(1, 2)

        q, k, v = rectangle(query), rectangle(key), rectangle(value)
        out = _attend(q, k, v, scores, self.window)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, slots).flatten(1)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of torch with the attribute that sequence parallelism of Megatron needs.

    With sequence parallelism, each tensor rank has a part of the tokens. The attribute makes Megatron sum the gradient
    of the weight over tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.epsilon = eps
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered = config.layernorm_zero_centered_gamma
        """Whether the stored weight is the scale minus 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., H). With zero-centered weights, 1 + weight and the product are computed in float32, because
        bfloat16 would round both."""
        if not self.zero_centered:
            return row_norm(x, self.weight, self.epsilon)
        return rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.epsilon).to(x.dtype)
