"""What the trainer needs to know of a Hugging Face model configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral")
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
    experts_per_token: int = 0
    """Experts that each token is sent to; 0: a dense model."""
    normalized_experts: bool = True
    """The weights of a token's experts sum to 1 (`norm_topk_prob`)."""

    @property
    def expert_parameters(self) -> int:
        """Of one expert in one layer: gate, up and down; 0 for a dense model."""
        return 3 * self.ffn_hidden_size * self.hidden_size if self.experts else 0


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
    if c.model_type in ("llama", "qwen3", "qwen3_moe") and c.attention_bias:
        raise ValueError("attention_bias: true is not supported for this family; use a model without it")
    experts = _expert_settings(c) if c.model_type == "qwen3_moe" else {}
    rope_type = c.rope_parameters["rope_type"]
    if rope_type not in _ROPE_TYPES:
        raise ValueError(f"rope type '{rope_type}' is not supported; use one of {', '.join(_ROPE_TYPES)}")
    layer_types = set(getattr(c, "layer_types", None) or ())
    if len(layer_types) > 1:
        raise ValueError("a mix of full and sliding attention layers is not supported; use a model with one kind")
    windowed = c.model_type in ("mistral", "qwen3_moe") or layer_types == {"sliding_attention"}
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
        qkv_bias=c.model_type == "qwen2",
        qk_norm=c.model_type in ("qwen3", "qwen3_moe"),
        sliding_window=getattr(c, "sliding_window", None) if windowed else None,
        initializer_range=c.initializer_range,
        hf_config=hf_config,
        **experts,
    )


def _expert_settings(c: Any) -> dict[str, Any]:
    """The fields of ArchitectureConfig on experts; raises ValueError where not every layer has them."""
    if c.decoder_sparse_step != 1 or c.mlp_only_layers:
        raise ValueError(
            f"decoder_sparse_step {c.decoder_sparse_step} with mlp_only_layers {c.mlp_only_layers} mixes dense layers "
            "among those with experts, which is not supported; use a model with experts in every layer"
        )
    if not 0 < c.num_experts_per_tok <= c.num_experts or c.num_experts < 2:
        raise ValueError(
            f"num_experts_per_tok {c.num_experts_per_tok} of num_experts {c.num_experts} is not supported; "
            "use a model of at least 2 experts that sends each token to some of them"
        )
    return {
        "experts": c.num_experts,
        "experts_per_token": c.num_experts_per_tok,
        "normalized_experts": c.norm_topk_prob,
    }


def padded_vocab_size(vocab_size: int, tp: int, multiple: int) -> int:
    """The vocabulary rounded up to `multiple`, or to a multiple of the tensor parallel size where that is 1."""
    step = multiple if multiple > 1 else tp
    return -(-vocab_size // step) * step
