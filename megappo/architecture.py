"""What the trainer needs to know of a Hugging Face model configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""Supported `model_type` values."""

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelShape:
    """The sizes that layouts and batches depend on."""

    family: str
    """`model_type` of config.json, one of FAMILIES."""
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    """Rows of the embedding, before padding for tensor parallelism."""
    max_position_embeddings: int
    """Tokens of the longest sequence."""
    tied_embeddings: bool


@dataclass(frozen=True)
class ArchitectureConfig(ModelShape):
    """A dense decoder of the Llama kind, in the terms of `config.json`."""

    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    sliding_window: int | None
    """Tokens each token sees, itself included; None: all before it."""
    initializer_range: float
    hf_config: PretrainedConfig = field(repr=False, compare=False)


def architecture(hf_config: PretrainedConfig) -> ArchitectureConfig:
    """Read an architecture from a Hugging Face configuration.

    Raises ValueError for a family, a rope type or a variant that the map to Megatron does not cover.
    """
    c: Any = hf_config
    if c.model_type not in FAMILIES:
        raise ValueError(f"model_type '{c.model_type}' is not supported; use a model of {', '.join(FAMILIES)}")
    if c.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act '{c.hidden_act}' is not supported; use a model with silu")
    if c.model_type == "llama" and c.mlp_bias:
        raise ValueError("mlp_bias: true is not supported; use a model without biases in its MLP")
    if c.model_type in ("llama", "qwen3") and c.attention_bias:
        raise ValueError("attention_bias: true is not supported for this family; use a model without it")
    rope_type = c.rope_parameters["rope_type"]
    if rope_type not in _ROPE_TYPES:
        raise ValueError(f"rope type '{rope_type}' is not supported; use one of {', '.join(_ROPE_TYPES)}")
    layer_types = set(getattr(c, "layer_types", None) or ())
    if len(layer_types) > 1:
        raise ValueError("a mix of full and sliding attention layers is not supported; use a model with one kind")
    windowed = c.model_type == "mistral" or layer_types == {"sliding_attention"}
    return ArchitectureConfig(
        family=c.model_type,
        hidden_size=c.hidden_size,
        layers=c.num_hidden_layers,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        ffn_hidden_size=c.intermediate_size,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_position_embeddings,
        tied_embeddings=c.tie_word_embeddings,
        norm_eps=c.rms_norm_eps,
        qkv_bias=c.model_type == "qwen2",
        qk_norm=c.model_type == "qwen3",
        sliding_window=getattr(c, "sliding_window", None) if windowed else None,
        initializer_range=c.initializer_range,
        hf_config=hf_config,
    )


def padded_vocab_size(vocab_size: int, tp: int, multiple: int) -> int:
    """The vocabulary rounded up to `multiple`, or to a multiple of the tensor parallel size where that is 1."""
    step = multiple if multiple > 1 else tp
    return -(-vocab_size // step) * step
