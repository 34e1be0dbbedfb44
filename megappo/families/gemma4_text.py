"""Gemma 4, the language model of its dense sizes: Gemma 3 with a factor on each layer and normed values. Layers without
a window have wider heads, fewer key heads, whose keys are the values too, and a rope that rotates a part of a head.
Scores are not scaled, and a norm multiplies by its weight."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megappo.families.architecture import ArchitectureConfig, ArchitectureExtensions, WideAttention
from megappo.families.blocks import QueryKeyNorms
from megappo.families.declaration import Block, Family, PerToken, Weight
from megappo.families.fields import Fields, HFConfig, MegatronSettings
from megappo.families.gemma2 import GeluMlp, NormedAttention, check_gemma, check_sees_backward
from megappo.families.reading import no_attention_bias, sizes, two_kinds, window_by_layer_types
from megappo.families.served import Served

_KINDS = {"sliding_attention": "default", "full_attention": "proportional"}
"""Kinds of layers, and the rope type of each."""
_OF_KIND = {"head_dim", "num_key_value_heads"}


def decoder_of_two_kinds(c: HFConfig) -> Fields:
    """Read the sizes, and those of layers without a window. Raises ValueError for layers that differ in more, and for
    ropes that transformers computes differently."""
    kinds = two_kinds(c, _KINDS)
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


def gemma4(c: HFConfig) -> Fields:
    """Read what Gemma 4 has beyond other decoders. Raises ValueError for sizes that are not dense, or whose layers take
    more than the residual stream, and for settings that some configurations may switch on."""
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
    extensions = ArchitectureExtensions(
        logits_cap=c.final_logit_softcapping,
        embedding_scale=math.sqrt(c.hidden_size),
        norms_after=True,
        layer_scalars=True,
        ropes=tuple(c.layer_types),
    )
    return {"score_width": 1, "extensions": extensions}


@dataclass(frozen=True)
class AttentionToKeys(NormedAttention):
    """Attention block of one of the two kinds of layers, with norms of queries, keys and values before it, and one
    behind it. The norm of values has no weight."""

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

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        own = {"layernorm_zero_centered_gamma": False}
        return super().megatron(arch) | QueryKeyNorms().megatron(arch) | own

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Keeps what norms of queries and keys do, and the values normed in float32, with their scales."""
        seen = _seen(arch, is_wide=self.is_wide)
        kept, live, moved = QueryKeyNorms().per_token(seen, element_bytes, fused=fused)
        return PerToken(kept + (4 + element_bytes) * seen.key_width + 4 * seen.kv_heads, live, moved)


class LayerScalar(Block):
    """Factor of a layer's output. In transformers' model it is a buffer, which is not trained."""

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
    """Servers have a class for `gemma4`, with images, alone, and read the sizes of wider heads there."""
    return "is Gemma 4 with images alone"


def passed_over(arch: ArchitectureConfig) -> tuple[str, ...]:
    """Beginnings of the names of tensors for images and audio."""
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
