"""DeepSeek-V3 and R1, Kimi-K2, Moonlight: latent attention, and experts as in GLM after some dense layers. A token
selects its experts from its best groups of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megappo.families.architecture import LatentAttention
from megappo.families.blocks import Experts, FirstMlp, SharedExpert, norm
from megappo.families.declaration import (
    ArchitectureConfig,
    Block,
    Family,
    PerToken,
    Weight,
    next_token_layers,
    without_next_token_layers,
)
from megappo.families.fields import Fields, HFConfig, MegatronSettings
from megappo.families.reading import biased_experts, decoder, no_attention_bias, no_window, silu_mlp
from megappo.families.served import NEEDS_GPU, Served, get_mscale, unread_yarn

_FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Settings of routers and layers that transformers does not read, with the only supported values."""
_MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.0}
"""Defaults of SGLang's DeepseekScalingRotaryEmbedding (srt/layers/rotary_embedding)."""


def latent_attention(c: HFConfig) -> Fields:
    """Read the sizes of heads and latents. Raises ValueError for shared key heads, and for inconsistent sizes."""
    if c.num_key_value_heads != c.num_attention_heads:
        raise ValueError(
            f"num_key_value_heads {c.num_key_value_heads} is not num_attention_heads {c.num_attention_heads}, but "
            "latent attention computes keys for each head; fix its config.json"
        )
    if c.head_dim != c.qk_rope_head_dim or c.qk_rope_head_dim < 2 or c.qk_rope_head_dim % 2:
        raise ValueError(
            f"qk_rope_head_dim {c.qk_rope_head_dim} with head_dim {c.head_dim} is not supported; use the same even "
            "number for both, or remove head_dim"
        )
    head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
    if not 1 <= c.v_head_dim <= head_dim:
        raise ValueError(
            f"v_head_dim {c.v_head_dim} is not supported; use a model with 1 to {head_dim} channels, as its queries"
        )
    sizes = {name: getattr(c, name) for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")}
    wrong = [f"{name} {size}" for name, size in sizes.items() if size is not None and size < 1]
    if wrong:
        raise ValueError(f"{wrong[0]} is not supported; use a model with at least 1")
    return {
        "head_dim": head_dim,
        "rotary_channels": c.qk_rope_head_dim,
        "latent": LatentAttention(
            c.q_lora_rank,
            c.kv_lora_rank,
            c.qk_nope_head_dim,
            c.qk_rope_head_dim,
            c.v_head_dim,
            interleaved=bool(c.rope_interleave),
        ),
    }


def alike(c: HFConfig) -> Fields:
    """Read no fields.

    Raises ValueError for routers and layers of DeepSeek-V2. transformers would silently build them as DeepSeek-V3.
    """
    for name, value in _FIXED.items():
        if getattr(c, name, value) != value:
            raise ValueError(
                f"{name} {getattr(c, name)} is ignored by transformers for {c.model_type}; use a model with {value}"
            )
    return {}


def softmax_scale(arch: ArchitectureConfig) -> float:
    """Return the factor on attention scores. YaRN's `mscale_all_dim` increases the factor (DeepSeek-V3's
    `yarn_get_mscale`)."""
    rope = arch.hf_config.rope_parameters
    stretch, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor") or 1.0
    more = 1.0 if rope["rope_type"] == "default" else get_mscale(factor, stretch)
    return float(more**2 * arch.head_dim**-0.5)


class LatentHeads(Block):
    """Latent attention block: the norm before it, the matrices of latents and heads, and the output matrix."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        net = _latent(arch)
        hidden, heads, rank = arch.hidden_size, arch.heads, net.query_rank
        down = {"self_attn.kv_a_proj_with_mqa.weight": (net.token_width, hidden)}
        of_query = [Weight("self_attention.linear_q_proj.weight", _queries("q_proj", arch, hidden), "column")]
        fused = ""
        if rank is not None:
            down, fused = (
                {"self_attn.q_a_proj.weight": (rank, hidden), **down},
                "self_attn.fused_qkv_a_proj_with_mqa.weight",
            )
            of_query = [
                norm("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", rank),
                Weight("self_attention.linear_q_up_proj.weight", _queries("q_b_proj", arch, rank), "column"),
            ]
        made = {"self_attn.kv_b_proj.weight": (heads * net.made_dim, net.rank)}
        out = {"self_attn.o_proj.weight": (hidden, heads * net.value_dim)}
        return (
            norm("input_layernorm.weight", "input_layernorm.weight", hidden),
            Weight("self_attention.linear_down_proj.weight", down, "replicated", fused=fused),
            *of_query,
            norm("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", net.rank),
            Weight("self_attention.linear_kv_up_proj.weight", made, "column"),
            Weight("self_attention.linear_proj.weight", out, "row"),
        )

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return {"softmax_scale": softmax_scale(arch)}

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Return the elements in memory at the same time: the matrices' outputs from latents, and the assembled
        queries, keys and values.

        Ranks do not divide the stored latents; `megappo.plan.bytes.activations` counts the latents.
        """
        net = _latent(arch)
        made = arch.heads * (arch.head_dim + net.made_dim)
        width = made + 3 * arch.query_width
        return PerToken(live_elements=width, moved_elements=width)


def _latent(arch: ArchitectureConfig) -> LatentAttention:
    assert arch.latent is not None
    return arch.latent


def _queries(name: str, arch: ArchitectureConfig, inputs: int) -> dict[str, tuple[int, int]]:
    return {f"self_attn.{name}.weight": (arch.query_width, inputs)}


def unserved(arch: ArchitectureConfig, conditions: Served) -> str:
    """Return the reason why SGLang cannot compute the model. On a CPU, SGLang crashes in generation. SGLang treats
    every rope type except the default as its own YaRN, whose factor differs for two settings."""
    if not conditions.on_cuda:
        return NEEDS_GPU
    rope = arch.hf_config.rope_parameters
    if rope["rope_type"] not in ("default", "yarn"):
        return f"computes rope type '{rope['rope_type']}' as yarn"
    if rope["rope_type"] == "default":
        return ""
    if not rope.get("truncate", True):
        return "ignores truncate: false of config.json's rope_parameters"
    if "apply_yarn_scaling" in rope:
        return "reads apply_yarn_scaling of config.json's rope_parameters, which transformers ignores"
    return unread_yarn(rope, _scale_of_yarn(rope))


def _scale_of_yarn(rope: Mapping[str, Any]) -> float | None:
    """Return the factor on cosine and sine in SGLang's DeepseekScalingRotaryEmbedding. Defaults are `mscale` 1 and
    `mscale_all_dim` 0."""
    if rope.get("factor") is None:
        return None
    mscale, of_all = (default if rope.get(name) is None else rope[name] for name, default in _MSCALES.items())
    return get_mscale(rope["factor"], mscale) / get_mscale(rope["factor"], of_all)


def extra_config(c: HFConfig) -> Fields:
    """Return the entries of config.json that SGLang requires and transformers does not write."""
    return {**without_next_token_layers(c), **_FIXED}


FAMILY = Family(
    "deepseek_v3",
    reads=(decoder, silu_mlp, no_attention_bias, no_window, alike, biased_experts, latent_attention),
    blocks=(LatentHeads(), FirstMlp(), Experts(), SharedExpert()),
    unserved=unserved,
    adapted=False,
    extra_config=extra_config,
    mtp_layers=next_token_layers,
    mtp_count_field="num_mtp_layers",
)
