"""Gemma 2: caps on attention scores and logits, windows in every other layer, norms before and after attention and MLP,
and embeddings times the root of their width. A norm's weight is what it multiplies by, less 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from megappo.families.architecture import ArchitectureConfig, ArchitectureExtensions
from megappo.families.blocks import Attention, GatedMlp, norm
from megappo.families.declaration import Family, PerToken, Weight
from megappo.families.fields import Activation, Fields, HFConfig, MegatronSettings
from megappo.families.reading import decoder, no_attention_bias, window_by_layer_types
from megappo.families.served import NEEDS_GPU, Served, unread_rope, unread_ties

_GELU = "gelu_pytorch_tanh"


def gemma(c: HFConfig) -> Fields:
    """Read what Gemma 2 and 3 have in common. Raises ValueError for settings that some configurations may switch on."""
    check_gemma(c)
    check_sees_backward(c, c.use_bidirectional_attention)
    if c.query_pre_attn_scalar < 1:
        raise ValueError(f"query_pre_attn_scalar {c.query_pre_attn_scalar} must be at least 1")
    extensions = ArchitectureExtensions(
        scores_cap=c.attn_logit_softcapping,
        logits_cap=c.final_logit_softcapping,
        embedding_scale=math.sqrt(c.hidden_size),
        norms_after=True,
    )
    return {"score_width": c.query_pre_attn_scalar, "extensions": extensions}


def check_gemma(c: HFConfig) -> None:
    """Raise ValueError for settings that some configurations of any Gemma may switch on."""
    if c.hidden_activation != _GELU:
        raise ValueError(f"hidden_activation '{c.hidden_activation}' is not supported; use a model with {_GELU}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        cap = getattr(c, name, None)
        if cap is not None and cap <= 0:
            raise ValueError(f"{name} {cap} must be above 0, or null")


def check_sees_backward(c: HFConfig, both_ways: bool) -> None:
    """Raise ValueError where tokens see those after them."""
    if both_ways:
        raise ValueError(
            f"use_bidirectional_attention {c.use_bidirectional_attention} lets tokens see those after them; use a "
            "model that generates from the left"
        )


class NormedAttention(Attention):
    """Attention with a norm behind it, whose weight Megatron has in the layer of the output matrix."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        after = norm("self_attention.linear_proj.norm.weight", "post_attention_layernorm.weight", arch.hidden_size)
        return (*super().weights(arch), after)

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return super().megatron(arch) | {"layernorm_zero_centered_gamma": True}


class GeluMlp(GatedMlp):
    """MLP block with norms before and behind it: GeGLU, down(gelu(gate) * up), with the tanh approximation of gelu."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        before = norm("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight", arch.hidden_size)
        after = norm("mlp.linear_fc2.norm.weight", "post_feedforward_layernorm.weight", arch.hidden_size)
        return (before, *super().weights(arch)[1:], after)

    def activation(self, arch: ArchitectureConfig) -> Activation:
        from torch.nn.functional import gelu

        return partial(gelu, approximate="tanh")

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Keeps gate, up, gelu(gate) and the product: torch's operations on every device."""
        return super().per_token(arch, element_bytes, fused=False)


def unserved(arch: ArchitectureConfig, asked: Served) -> str:
    """A server does not start without Triton's driver, and reads no parameters of a rope."""
    if not asked.on_cuda:
        return NEEDS_GPU
    return unread_ties(arch) or unread_rope(arch, ("default",))


def activation(c: HFConfig) -> Fields:
    """The activation by the name under which servers read it."""
    return {"hidden_act": c.hidden_activation}


FAMILY = Family(
    "gemma2",
    reads=(decoder, no_attention_bias, gemma, window_by_layer_types),
    blocks=(NormedAttention(), GeluMlp()),
    unserved=unserved,
    extra_config=activation,
)
