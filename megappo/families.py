"""The model families: what transformers reads of a family's `config.json`, and what its files hold beside the weights.

A setting that transformers does not read for a family, or reads in a way that the models built here lack, is refused:
weights of another model would come out of it without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

WindowedLayers = Literal["none", "all", "by_type"]


@dataclass(frozen=True)
class Family:
    """What one `model_type` means."""

    qkv_bias: bool = False
    """Query, key and value have biases, whatever config.json says."""
    qk_norm: bool = False
    has_experts: bool = False
    windowed: WindowedLayers = "none"
    """Layers that `sliding_window` holds for; `by_type`: those that `layer_types` calls sliding."""
    attention_bias: tuple[bool, ...] = (False,)
    """Values of `attention_bias` that mean what is built."""
    ignored_tensors: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Ends of names of tensors that older files hold and nobody reads: they follow from config.json."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True, windowed="by_type", attention_bias=(False, True)),
    "qwen3": Family(qk_norm=True, windowed="by_type"),
    "qwen3_moe": Family(qk_norm=True, has_experts=True, windowed="all"),
    "mistral": Family(windowed="all"),
}
"""By `model_type` of config.json."""

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SILU = ("silu", "swish")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def family_of(c: Any) -> Family:
    """The family of a transformers configuration; raises ValueError for a setting that it does not cover."""
    if c.model_type not in FAMILIES:
        raise ValueError(f"model_type '{c.model_type}' is not supported; use a model of {', '.join(FAMILIES)}")
    family = FAMILIES[c.model_type]
    if getattr(c, "is_heterogeneous", False):
        raise ValueError("per_layer_config is not supported; use a model whose layers are alike")
    if c.hidden_act not in _SILU:
        raise ValueError(f"hidden_act '{c.hidden_act}' is not supported; use a model with silu")
    if getattr(c, "mlp_bias", False):
        raise ValueError("mlp_bias: true is not supported; use a model without biases in its MLP")
    if getattr(c, "attention_bias", False) not in family.attention_bias:
        raise ValueError("attention_bias: true is not supported for this family; use a model without it")
    if not getattr(c, "is_causal", True):
        raise ValueError("is_causal: false lets tokens see those after them; use a model that generates from the left")
    _check_rope(c)
    return family


def _check_rope(c: Any) -> None:
    rope = c.rope_parameters
    if not isinstance(rope.get("rope_type"), str):
        raise ValueError(f"rope_parameters of '{', '.join(rope)}' are not supported; use a model with one rope")
    if rope["rope_type"] not in _ROPE_TYPES:
        raise ValueError(f"rope type '{rope['rope_type']}' is not supported; use one of {', '.join(_ROPE_TYPES)}")
    factor = rope.get("partial_rotary_factor", getattr(c, "partial_rotary_factor", None))
    if factor is not None and factor != 1:
        raise ValueError(
            f"partial_rotary_factor {factor} is not supported; use a model that rotates all of a head (1, or none)"
        )


def window_tokens(family: Family, c: Any) -> int | None:
    """Tokens that each token sees, itself included; None: all before it.

    Raises ValueError for layers that differ, kinds of attention that are not covered, and windows that transformers
    would not apply, or would apply against `layer_types`.
    """
    kinds = tuple(dict.fromkeys(getattr(c, "layer_types", None) or ()))
    other = [kind for kind in kinds if kind not in _LAYER_TYPES]
    if other:
        raise ValueError(f"layer_types of '{other[0]}' is not supported; use a model of {' or '.join(_LAYER_TYPES)}")
    if len(kinds) > 1:
        raise ValueError("a mix of full and sliding attention layers is not supported; use a model with one kind")
    window: int | None = getattr(c, "sliding_window", None)
    if window is not None and window < 1:
        raise ValueError(f"sliding_window {window} must be at least 1 token, or null")
    if family.windowed == "none" and getattr(c, "use_sliding_window", None) is False:
        window = None
    if family.windowed == "none" and window is not None:
        raise ValueError(
            f"sliding_window {window} means nothing to transformers for {c.model_type}, whose tokens see all before "
            "them; take it out of config.json, or use the model_type whose attention has the window"
        )
    is_sliding = kinds == ("sliding_attention",)
    if family.windowed == "by_type":
        window = window if is_sliding else None
    if kinds and is_sliding != (window is not None):
        found = "no sliding_window" if window is None else f"a sliding_window of {window} in every layer"
        raise ValueError(
            f"layer_types of '{kinds[0]}' contradicts what transformers computes for this {c.model_type}, {found}; "
            "make layer_types and sliding_window of config.json agree"
        )
    return window


def expert_settings(c: Any) -> dict[str, Any]:
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


def stored_blocks(c: Any) -> tuple[int, int] | None:
    """Rows and columns of the blocks of float8 weights that share a scale, by `quantization_config`; None without one.

    Raises ValueError for every other way in which weights may be quantised.
    """
    for name in ("compression_config", "quantization_config"):
        said = getattr(c, name, None)
        if said is None:
            continue
        content = {"quant_method": None, **(said if isinstance(said, Mapping) else {})}
        blocks: Any = content.get("weight_block_size")
        is_pair = isinstance(blocks, Sequence) and len(blocks) == 2 and all(type(n) is int and n > 0 for n in blocks)
        usual = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        other = {key: content[key] for key, value in usual.items() if content.get(key, value) != value}
        if name == "quantization_config" and is_pair and not other:
            return blocks[0], blocks[1]
        words = ", ".join(f"{key} {value}" for key, value in (other or {"weight_block_size": blocks}).items())
        raise ValueError(
            f"{name} with {words} is not supported; use the model's plain weights, or float8 weights scaled in blocks "
            "(quant_method fp8 with two numbers as weight_block_size)"
        )
    return None
