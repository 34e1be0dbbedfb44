"""Gemma 4, the language model of the dense sizes: Gemma 3 with a scalar for each layer and norms of values. Layers
without a window have wider heads and fewer key heads. In these layers, keys and values are equal before the norm,
and the rope rotates a part of a head. Scores are not scaled. Norms multiply by their weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megappo.families.architecture import ArchitectureExtensions, WideAttention
from megappo.families.blocks import QueryKeyNorms
from megappo.families.declaration import ArchitectureConfig, Block, Family, PerToken, Weight
from megappo.families.fields import Fields, HFConfig, MegatronSettings
from megappo.families.gemma2 import GeluMlp, NormedAttention, check_gemma, check_sees_backward
from megappo.families.reading import no_attention_bias, sizes, two_kinds, window_by_layer_types
from megappo.families.served import Served

_KINDS = {"sliding_attention": "default", "full_attention": "proportional"}
"""Kinds of layers with their rope types."""
_OF_KIND = {"head_dim", "num_key_value_heads"}


def decoder_of_two_kinds(c: HFConfig) -> Fields:
    """Read the sizes of both kinds of layers.

    Raises ValueError for layers with other differences, and for ropes that transformers computes differently.
    """
    kinds = two_kinds(c, _KINDS)
    differing = sorted(set(c.per_layer_attributes or ()) - _OF_KIND)
    if differing:
        raise ValueError(
            f"per_layer_config of {differing[0]} is not supported; use a model whose layers differ only in "
            f"{' and '.join(sorted(_OF_KIND))}"
        )
    near, far = (c.per_layer_config[kind] for kind in _KINDS)
    for kind, usual in _KINDS.items():
        rope = c.rope_parameters[kind]
        factor = rope.get("partial_rotary_factor")
        if rope["rope_type"] != usual or (usual == "default" and factor not in (None, 1)):
            name = rope["rope_type"] if factor is None else f"{rope['rope_type']} with partial_rotary_factor {factor}"
            raise ValueError(f"rope type '{name}' of {kind} is not supported for this family; use {usual}")
    of_near, wide = sizes(near), sizes(far)
    layers = tuple(n for n, kind in enumerate(kinds) if kind == "full_attention")
    return {**of_near, "wide_attention": WideAttention(layers, wide["head_dim"], wide["kv_heads"])}


def gemma4(c: HFConfig) -> Fields:
    """Read the fields that are specific to Gemma 4.

    Raises ValueError for models that are not dense, for layers with inputs other than the residual stream, and for
    unsupported optional settings.
    """
    check_gemma(c)
    check_sees_backward(c, c.use_bidirectional_attention == "all")  # "vision" applies to images only
    for name, means in (
        ("hidden_size_per_layer_input", "embeddings of each layer"),
        ("num_kv_shared_layers", "layers that share keys"),
        ("enable_moe_block", "experts"),
    ):
        if getattr(c, name):
            raise ValueError(
                f"{name} {getattr(c, name)} adds {means}, which is not supported for this family; use a dense model "
                "without this setting, such as Gemma-4-31B"
            )
    if not c.attention_k_eq_v:
        raise ValueError("attention_k_eq_v: false is not supported; use a model with equal keys and values (true)")
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
    """Attention block of one kind of layers, with norms of queries, keys and values and an output norm. The norm of
    values has no weight."""

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
        """Return the activations: those of the norms of queries and keys, the float32 values after the norm, and
        their scales."""
        seen = _seen(arch, is_wide=self.is_wide)
        stored_bytes, live, moved = QueryKeyNorms().per_token(seen, element_bytes, fused=fused)
        return PerToken(stored_bytes + (4 + element_bytes) * seen.key_width + 4 * seen.kv_heads, live, moved)


class LayerScalar(Block):
    """Scalar that multiplies the output of a layer. transformers' model has an untrained buffer for the scalar."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        return (Weight("layer_scalar", {"layer_scalar": (1,)}, "replicated", drawn="ones"),)


def _layers(arch: ArchitectureConfig, *, is_wide: bool) -> tuple[int, ...]:
    assert arch.wide_attention is not None
    return tuple(n for n in range(arch.layers) if (n in arch.wide_attention.layers) == is_wide)


def _seen(arch: ArchitectureConfig, *, is_wide: bool) -> ArchitectureConfig:
    """Return the architecture with the head sizes of one kind of layer."""
    wide = arch.wide_attention
    assert wide is not None
    return replace(arch, head_dim=wide.head_dim, kv_heads=wide.kv_heads) if is_wide else arch


def unserved(arch: ArchitectureConfig, conditions: Served) -> str:
    """Return the reason: SGLang supports only `gemma4` with images, and reads the sizes of wide heads only in this
    class."""
    return "supports Gemma 4 only with images"


def passed_over(arch: ArchitectureConfig) -> tuple[str, ...]:
    """Return the name prefixes of image and audio tensors."""
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
