"""Functions that convert transformers' configuration to fields of ArchitectureConfig. Families list the functions in
`Family.reads`.

The functions raise ValueError for settings that transformers ignores for a family, and for settings that the blocks
do not support. Without these errors, a different model would silently be trained.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megappo.families.fields import Fields, HFConfig

_SILU = ("silu", "swish")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_POSITIVE = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size", "moe_intermediate_size",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "initializer_range",
)  # fmt: skip
_LAYER_TYPES = ("full_attention", "sliding_attention")


def decoder(c: HFConfig) -> Fields:
    """Read the sizes of a decoder by their usual names.

    Raises ValueError for different layers, for bidirectional attention, and for unsupported ropes, head counts and
    stored weights.
    """
    fields = sizes(c)
    _check_rope(c, partly_rotated=False)
    return fields


def partly_rotated_decoder(c: HFConfig) -> Fields:
    """Read the sizes of a decoder with full or partial rotation of the channels of each head.

    Raises ValueError like `decoder`, and for an invalid number of rotated channels.
    """
    fields = sizes(c)
    _check_rope(c, partly_rotated=True)
    factor = _rotated_part(c, c.rope_parameters)
    channels = fields["head_dim"] if factor is None else int(fields["head_dim"] * factor)
    if not 2 <= channels <= fields["head_dim"] or channels % 2:
        raise ValueError(
            f"partial_rotary_factor {factor} rotates {channels} of the {fields['head_dim']} channels of a head; use a "
            "factor that rotates an even number of channels, at least 2 and at most all"
        )
    return {**fields, "rotary_channels": channels}


def _rotated_part(c: HFConfig, rope: Mapping[str, Any]) -> float | None:
    factor: float | None = rope.get("partial_rotary_factor", getattr(c, "partial_rotary_factor", None))
    return factor


def sizes(c: HFConfig) -> Fields:
    """Read the sizes of a decoder without its rope. Raises ValueError like `decoder`, except for ropes."""
    if getattr(c, "is_heterogeneous", False):
        raise ValueError("per_layer_config is not supported; use a model with equal layers")
    if not getattr(c, "is_causal", True):
        raise ValueError("is_causal: false is not supported: tokens would attend to later tokens; use a causal model")
    _check_positive(c)
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; fix its config.json "
            "(num_key_value_heads is optional; each family has a default)"
        )
    return {
        "hidden_size": c.hidden_size,
        "layers": c.num_hidden_layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": getattr(c, "head_dim", None) or c.hidden_size // heads,
        "ffn_hidden_size": getattr(c, "intermediate_size", 0),  # models without dense layers have none
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "tied_embeddings": c.tie_word_embeddings,
        "norm_eps": c.rms_norm_eps,
        "initializer_range": c.initializer_range,
        "stored_blocks": _stored_blocks(c),
    }


def _check_positive(c: HFConfig) -> None:
    """Raise ValueError for sizes and scales that are not positive and finite. transformers checks only their types."""
    for name in _POSITIVE:
        value = getattr(c, name, None)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}, must be positive; fix config.json")


def silu_mlp(c: HFConfig) -> Fields:
    """Read no fields. Raises ValueError for activations other than silu, and for biases in the MLP."""
    if c.hidden_act not in _SILU:
        raise ValueError(f"hidden_act '{c.hidden_act}' is not supported; use a model with silu")
    if getattr(c, "mlp_bias", False):
        raise ValueError("mlp_bias: true is not supported; use a model without biases in its MLP")
    return {}


def no_attention_bias(c: HFConfig) -> Fields:
    """Read no fields. Raises ValueError for biases in attention."""
    if getattr(c, "attention_bias", False):
        raise ValueError("attention_bias: true is not supported for this family; use a model without it")
    return {}


def _check_rope(c: HFConfig, *, partly_rotated: bool) -> None:
    ropes, kinds = c.rope_parameters, getattr(c, "layer_types", None) or ()
    if isinstance(ropes.get("rope_type"), str):
        _check_one_rope(c, ropes, partly_rotated=partly_rotated)
    elif not isinstance(getattr(c, "default_theta", None), Mapping) or ropes.keys() != set(_LAYER_TYPES) | set(kinds):
        raise ValueError(f"rope_parameters of '{', '.join(ropes)}' are not supported; use a model with one rope")
    else:  # one rope for each kind of layer
        for rope in ropes.values():
            _check_one_rope(c, rope, partly_rotated=partly_rotated)


def _check_one_rope(c: HFConfig, rope: Mapping[str, Any], *, partly_rotated: bool) -> None:
    if rope["rope_type"] not in _ROPE_TYPES:
        raise ValueError(f"rope type '{rope['rope_type']}' is not supported; use one of {', '.join(_ROPE_TYPES)}")
    factor = _rotated_part(c, rope)
    if factor not in (None, 1) and not partly_rotated:
        raise ValueError(
            f"partial_rotary_factor {factor} is not supported; use a model that rotates all channels (1 or unset)"
        )


def no_window(c: HFConfig) -> Fields:
    """Read no window, for families without windows in transformers. Raises ValueError if config.json contains a
    window."""
    window = None if getattr(c, "use_sliding_window", None) is False else _stated_window(c)
    if window is not None:
        raise ValueError(
            f"sliding_window {window} is ignored by transformers for {c.model_type}; remove sliding_window from "
            "config.json, or use a model_type with sliding attention"
        )
    return _agreeing(c, None)


def window_of_every_layer(c: HFConfig) -> Fields:
    """Read `sliding_window`, for families with the window in every layer. Raises ValueError if `layer_types`
    contradicts the window."""
    return _agreeing(c, _stated_window(c))


def window_by_layer_types(c: HFConfig) -> Fields:
    """Read `sliding_window`, for families with the window in the sliding layers of `layer_types`.

    Raises ValueError if `layer_types` and the window contradict each other, and for layers without a type.
    """
    window, kinds = _stated_window(c), _layer_types(c)
    if len(kinds) < 2:
        return _agreeing(c, window if "sliding_attention" in kinds else None)
    if window is None:
        return _agreeing(c, None)
    if len(c.layer_types) != c.num_hidden_layers:
        raise ValueError(
            f"layer_types has {len(c.layer_types)} entries for num_hidden_layers {c.num_hidden_layers}; list all layers"
        )
    windowed = tuple(kind == "sliding_attention" for kind in c.layer_types)
    return {"sliding_window": window, "windowed_layers": windowed}


def _layer_types(c: HFConfig) -> tuple[str, ...]:
    """Return the different layer types. Returns () if config.json has no layer types."""
    kinds = tuple(dict.fromkeys(getattr(c, "layer_types", None) or ()))
    other = [kind for kind in kinds if kind not in _LAYER_TYPES]
    if other:
        raise ValueError(f"layer_types of '{other[0]}' is not supported; use a model of {' or '.join(_LAYER_TYPES)}")
    return kinds


def two_kinds(c: HFConfig, allowed: Collection[str]) -> tuple[str, ...]:
    """Return the type of each layer. Raises ValueError unless the model has layers of both `allowed` types, and no
    others."""
    kinds = tuple(c.layer_types)
    other = [kind for kind in kinds if kind not in allowed]
    if other or len(set(kinds)) < 2:
        names = f"'{other[0]}'" if other else f"only '{kinds[0]}'"
        raise ValueError(f"layer_types of {names} is not supported; use a model of {' and '.join(allowed)}")
    return kinds


def _stated_window(c: HFConfig) -> int | None:
    _layer_types(c)
    window: int | None = getattr(c, "sliding_window", None)
    if window is not None and window < 1:
        raise ValueError(f"sliding_window {window} must be at least 1 token, or null")
    return window


def _agreeing(c: HFConfig, window: int | None) -> Fields:
    """Return the window that transformers applies. Raises ValueError if `layer_types` contradicts the window."""
    wrong = [kind for kind in _layer_types(c) if (kind == "sliding_attention") != (window is not None)]
    if wrong:
        layers = "no sliding_window" if window is None else f"a sliding_window of {window} in every layer"
        raise ValueError(
            f"layer_types of '{wrong[0]}' contradicts the settings that transformers uses for this {c.model_type}, "
            f"{layers}; make layer_types and sliding_window of config.json consistent"
        )
    return {"sliding_window": window}


def experts(c: HFConfig) -> Fields:
    """Read the experts of every layer. Raises ValueError for models with dense layers."""
    if c.decoder_sparse_step != 1 or c.mlp_only_layers:
        raise ValueError(
            f"decoder_sparse_step {c.decoder_sparse_step} with mlp_only_layers {c.mlp_only_layers} mixes dense layers "
            "and layers with experts, which is not supported; use a model with experts in every layer"
        )
    counts = expert_counts(c, "num_experts")
    return {**counts, "ffn_hidden_size": c.moe_intermediate_size, "normalized_experts": c.norm_topk_prob}


def expert_counts(c: HFConfig, name: str) -> Fields:
    """Read the number of experts from the setting `name`, and the number of experts per token.

    Raises ValueError for invalid numbers.
    """
    count = getattr(c, name)
    if not 0 < c.num_experts_per_tok <= count or count < 2:
        raise ValueError(
            f"num_experts_per_tok {c.num_experts_per_tok} of {name} {count} is not supported; "
            "use a model with at least 2 experts and a valid number of experts per token"
        )
    return {"experts": count, "experts_per_token": c.num_experts_per_tok}


def biased_experts(c: HFConfig) -> Fields:
    """Read experts after the first dense layers, with a sigmoid router, a correction bias and a shared expert. The
    router selects from groups of experts, or from all experts.

    Raises ValueError for experts that Megatron would weight differently, for invalid groups, and for models without
    layers of experts.
    """
    if not c.norm_topk_prob:
        raise ValueError("norm_topk_prob: false is not supported for this family; use a model with true")
    if c.num_experts_per_tok < 2:
        raise ValueError(f"num_experts_per_tok {c.num_experts_per_tok} is not supported; use a model with at least 2")
    if c.n_shared_experts < 1:
        raise ValueError(f"n_shared_experts {c.n_shared_experts} is not supported; use a model with at least 1")
    if not 0 <= c.first_k_dense_replace < c.num_hidden_layers:
        raise ValueError(
            f"first_k_dense_replace {c.first_k_dense_replace} leaves none of num_hidden_layers {c.num_hidden_layers} "
            "with experts; use a model with at least one layer of experts"
        )
    return {
        **expert_counts(c, "num_local_experts"),
        **_expert_groups(c),
        "ffn_hidden_size": c.moe_intermediate_size,
        "dense_layers": c.first_k_dense_replace,
        "dense_ffn_hidden_size": c.intermediate_size if c.first_k_dense_replace else 0,
        "shared_ffn_hidden_size": c.moe_intermediate_size * c.n_shared_experts,
        "sigmoid_router": True,
        "experts_scale": c.routed_scaling_factor,
    }


def _expert_groups(c: HFConfig) -> Fields:
    groups, chosen, experts = c.n_group or 0, c.topk_group or 0, c.num_local_experts
    size = experts // groups if groups > 0 else 0
    if size < 2 or experts % groups or not c.num_experts_per_tok <= chosen * size <= experts:
        raise ValueError(
            f"n_group {c.n_group} and topk_group {c.topk_group} cannot select num_experts_per_tok "
            f"{c.num_experts_per_tok} of {experts} experts: groups must have equal sizes of at least 2, and the "
            "selected groups must contain enough experts; fix its config.json (1 and 1 selects among all experts)"
        )
    return {"expert_groups": groups, "groups_per_token": chosen}


def _stored_blocks(c: HFConfig) -> tuple[int, int] | None:
    """Return the rows and columns of a float8 block with one scale, from `quantization_config`. Returns None without
    one.

    Raises ValueError for every other kind of quantisation.
    """
    for name in ("compression_config", "quantization_config"):
        quantization = getattr(c, name, None)
        if quantization is None:
            continue
        content = {"quant_method": None, **(quantization if isinstance(quantization, Mapping) else {})}
        blocks: Any = content.get("weight_block_size")
        is_pair = isinstance(blocks, Sequence) and len(blocks) == 2 and all(type(n) is int and n > 0 for n in blocks)
        usual = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        other = {key: content[key] for key, value in usual.items() if content.get(key, value) != value}
        if name == "quantization_config" and is_pair and not other:
            return blocks[0], blocks[1]
        entries = ", ".join(f"{key} {value}" for key, value in (other or {"weight_block_size": blocks}).items())
        raise ValueError(
            f"{name} with {entries} is not supported; use the model's plain weights, or float8 weights scaled in "
            "blocks (quant_method fp8 with two numbers as weight_block_size)"
        )
    return None
