"""What the trainer needs to know of a Hugging Face model configuration."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megappo.families import expert_settings, family_of, stored_blocks, window_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ModelShape:
    """The sizes that layouts and batches depend on."""

    family: str
    """`model_type` of config.json, one of `megappo.families.FAMILIES`."""
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    """Of the MLP, or of each expert where there are experts."""
    vocab_size: int
    """Rows of the embedding, before padding for tensor parallelism."""
    max_position_embeddings: int
    """Tokens of the longest sequence."""
    tied_embeddings: bool
    experts: int = field(default=0, kw_only=True)
    """Experts of each layer; 0: a dense model."""


@dataclass(frozen=True)
class ArchitectureConfig(ModelShape):
    """A decoder of the Llama kind, dense or with experts in every layer, in the terms of `config.json`."""

    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    sliding_window: int | None
    """Tokens each token sees, itself included; None: all before it."""
    initializer_range: float
    hf_config: PretrainedConfig = field(repr=False, compare=False)
    """Of the plain model: without `quantization_config`, which says how the files were stored."""
    experts_per_token: int = 0
    """Experts that each token is sent to; 0: a dense model."""
    normalized_experts: bool = True
    """The weights of a token's experts sum to 1 (`norm_topk_prob`)."""
    stored_blocks: tuple[int, int] | None = field(default=None, compare=False)
    """Rows and columns of the blocks that share a scale where the files hold float8 weights; None: plain weights."""

    @property
    def expert_parameters(self) -> int:
        """Of one expert in one layer: gate, up and down; 0 for a dense model."""
        return 3 * self.ffn_hidden_size * self.hidden_size if self.experts else 0


def architecture(hf_config: PretrainedConfig) -> ArchitectureConfig:
    """Read an architecture from a Hugging Face configuration.

    Raises ValueError for a family or a variant that the map to Megatron does not cover.
    """
    c: Any = copy.deepcopy(hf_config)
    family = family_of(c)
    experts = expert_settings(c) if family.has_experts else {}
    blocks = stored_blocks(c)
    if hasattr(c, "quantization_config"):
        del c.quantization_config
    return ArchitectureConfig(
        family=c.model_type,
        hidden_size=c.hidden_size,
        layers=c.num_hidden_layers,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        ffn_hidden_size=c.moe_intermediate_size if experts else c.intermediate_size,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_position_embeddings,
        tied_embeddings=c.tie_word_embeddings,
        norm_eps=c.rms_norm_eps,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        sliding_window=window_tokens(family, c),
        initializer_range=c.initializer_range,
        hf_config=c,
        stored_blocks=blocks,
        **experts,
    )


def padded_vocab_size(vocab_size: int, tp: int, multiple: int) -> int:
    """The vocabulary rounded up to `multiple`, or to a multiple of the tensor parallel size where that is 1."""
    step = multiple if multiple > 1 else tp
    return -(-vocab_size // step) * step
