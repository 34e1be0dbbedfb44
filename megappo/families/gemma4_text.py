"""Gemma 4, the language model of its dense sizes: Gemma 3 with a number that multiplies each layer, normed values, and
in the layers without a window wider heads, fewer of keys, which are the values too, and a rope that turns a part of a
head. Scores are not scaled, and a norm's weight is what it multiplies by."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megappo.families.architecture import ArchitectureConfig, Beyond, WideAttention
from megappo.families.blocks import QueryKeyNorms
from megappo.families.declaration import Block, Family, PerToken, Weight
from megappo.families.gemma2 import GeluMlp, NormedAttention, check_gemma, check_sees_backward
from megappo.families.reading import no_attention_bias, sizes, window_by_layer_types
from megappo.families.served import Served

_KINDS = {"sliding_attention": "default", "full_attention": "proportional"}
"""The kinds of layers, and the rope of each."""
_OF_KIND = {"head_dim", "num_key_value_heads"}


def decoder_of_two_kinds(c: Any) -> dict[str, Any]:
    """The sizes, and those of layers without a window. Raises ValueError for layers that differ in more, and for ropes
    that transformers computes otherwise."""
    kinds = tuple(c.layer_types)
    other = [kind for kind in kinds if kind not in _KINDS]
    if other or len(set(kinds)) < 2:
        found = f"'{other[0]}'" if other else f"'{kinds[0]}' alone"
        raise ValueError(f"layer_types of {found} is not supported; use a model of {' and '.join(_KINDS)}")
    differing = sorted(set(c.per_layer_attributes or ()) - _OF_KIND)
    if differing:
        raise ValueError(
            f"per_layer_config of {differing[0]} is not supported; use a model whose layers differ in "
            f"{' and '.join(sorted(_OF_KIND))} alone"
        )
    near, far = (c.per_layer_config[kind] for kind in _KINDS)
    for kind, usual in _KINDS.items():
        rope = c.rope_parameters[kind]
        factor = rope.get("partial_rotary_factor")
        if rope["rope_type"] != usual or (usual == "default" and factor not in (None, 1)):
            words = rope["rope_type"] if factor is None else f"{rope['rope_type']} with partial_rotary_factor {factor}"
            raise ValueError(f"rope type '{words}' of {kind} is not supported for this family; use {usual}")
    of_near, wide = sizes(near), sizes(far)
    layers = tuple(n for n, kind in enumerate(kinds) if kind == "full_attention")
    return {**of_near, "wide_attention": WideAttention(layers, wide["head_dim"], wide["kv_heads"])}


def gemma4(c: Any) -> dict[str, Any]:
    """What it has beyond other decoders. Raises ValueError for the sizes that are not dense, or whose layers take more
    than the residual stream, and for what some configurations may switch on."""
    check_gemma(c)
    check_sees_backward(c, c.use_bidirectional_attention == "all")  # "vision" is of images alone
    for name, means in (
        ("hidden_size_per_layer_input", "embeddings of each layer"),
        ("num_kv_shared_layers", "layers that take the keys of others"),
        ("enable_moe_block", "experts"),
    ):
        if getattr(c, name):
            raise ValueError(
                f"{name} {getattr(c, name)} gives the model {means}, which is not supported for this family; use a "
                "dense one without it, such as Gemma-4-31B"
            )
    if not c.attention_k_eq_v:
        raise ValueError("attention_k_eq_v: false is not supported; use a model whose keys are its values (true)")
    beyond = Beyond(
        logits_cap=c.final_logit_softcapping,
        embedding_scale=math.sqrt(c.hidden_size),
        norms_after=True,
        layer_scalars=True,
        ropes=tuple(c.layer_types),
    )
    return {"score_width": 1, "beyond": beyond}


@dataclass(frozen=True)
class AttentionToKeys(NormedAttention):
    """Attention of one of the two kinds, with norms of queries, keys and values before it, and one behind it. The norm
    of values has no weight."""

    is_wide: bool

    def layers(self, arch: ArchitectureConfig) -> Collection[int]:
        return _layers(arch, is_wide=self.is_wide)

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        seen = _seen(arch, is_wide=self.is_wide)
        before, qkv, out, after = super().weights(seen)
        if self.is_wide:
            queries, keys, _ = qkv.tensors.items()
            qkv = replace(qkv, tensors=dict((queries, keys)))
        return (before, qkv, out, after, *QueryKeyNorms().weights(seen))

    def megatron(self, arch: ArchitectureConfig) -> dict[str, Any]:
        own = {"layernorm_zero_centered_gamma": False}
        return super().megatron(arch) | QueryKeyNorms().megatron(arch) | own

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """The norms of queries and keys, and the values normed in float32, with their scales."""
        seen = _seen(arch, is_wide=self.is_wide)
        kept, live, moved = QueryKeyNorms().per_token(seen, element_bytes, fused=fused)
        return PerToken(kept + (4 + element_bytes) * seen.key_width + 4 * seen.kv_heads, live, moved)


class LayerScalar(Block):
    """The number that multiplies what a layer gives. It is a buffer of transformers' model, which is not trained."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        return (Weight("layer_scalar", {"layer_scalar": (1,)}, "replicated", drawn="ones"),)


def _layers(arch: ArchitectureConfig, *, is_wide: bool) -> tuple[int, ...]:
    assert arch.wide_attention is not None
    return tuple(n for n in range(arch.layers) if (n in arch.wide_attention.layers) == is_wide)


def _seen(arch: ArchitectureConfig, *, is_wide: bool) -> ArchitectureConfig:
    """The architecture as if all of its layers were of one kind."""
    wide = arch.wide_attention
    assert wide is not None
    return replace(arch, head_dim=wide.head_dim, kv_heads=wide.kv_heads) if is_wide else arch


def unserved(arch: ArchitectureConfig, asked: Served) -> str:
    """Of SGLang 0.5.23's classes; it reads the sizes of the wider heads of `gemma4` alone."""
    return f"SGLang has no {arch.family}, but Gemma 4 with images alone"


def passed_over(arch: ArchitectureConfig) -> tuple[str, ...]:
    """What sees images and hears."""
    return ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")


FAMILY = Family(
    "gemma4_text",
    reads=(decoder_of_two_kinds, no_attention_bias, gemma4, window_by_layer_types),
    blocks=(AttentionToKeys(is_wide=False), AttentionToKeys(is_wide=True), GeluMlp(), LayerScalar()),
    unserved=unserved,
    adapted=False,
    passed_over=passed_over,
    within="gemma4",
    stored_prefix="model.language_model.",
)
