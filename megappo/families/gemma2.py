"""Gemma 2: caps on attention scores and logits, a window in every second layer, norms before and after attention and
MLP, and embeddings times the square root of the hidden size. Norms multiply by 1 plus their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from megappo.families.architecture import ArchitectureExtensions
from megappo.families.blocks import Attention, GatedMlp, norm
from megappo.families.declaration import ArchitectureConfig, Family, PerToken, Weight
from megappo.families.fields import Activation, Fields, HFConfig, MegatronSettings
from megappo.families.reading import decoder, no_attention_bias, window_by_layer_types
from megappo.families.served import NEEDS_GPU, Served, unread_rope, unread_ties

_GELU = "gelu_pytorch_tanh"


def gemma(c: HFConfig) -> Fields:
    """Read the common fields of Gemma 2 and Gemma 3. Raises ValueError for unsupported optional settings."""
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
    """Raise ValueError for optional settings that are not supported for any Gemma model."""
    if c.hidden_activation != _GELU:
        raise ValueError(f"hidden_activation '{c.hidden_activation}' is not supported; use a model with {_GELU}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        cap = getattr(c, name, None)
        if cap is not None and cap <= 0:
            raise ValueError(f"{name} {cap} must be above 0, or null")


def check_sees_backward(c: HFConfig, both_ways: bool) -> None:
    """Raise ValueError if attention is bidirectional."""
    if both_ways:
        raise ValueError(
            f"use_bidirectional_attention {c.use_bidirectional_attention} is not supported: tokens would attend to "
            "later tokens; use a causal model"
        )


class NormedAttention(Attention):
    """Attention with an output norm. Megatron's layer of the output matrix contains the weight of this norm."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        after = norm("self_attention.linear_proj.norm.weight", "post_attention_layernorm.weight", arch.hidden_size)
        return (*super().weights(arch), after)

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return super().megatron(arch) | {"layernorm_zero_centered_gamma": True}


class GeluMlp(GatedMlp):
    """MLP block with norms before and after it. The activation is GeGLU, down(gelu(gate) * up), with the tanh
    approximation of gelu."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        before = norm("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight", arch.hidden_size)
        after = norm("mlp.linear_fc2.norm.weight", "post_feedforward_layernorm.weight", arch.hidden_size)
        return (before, *super().weights(arch)[1:], after)

    def activation(self, arch: ArchitectureConfig) -> Activation:
        from torch.nn.functional import gelu

        return partial(gelu, approximate="tanh")

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        """Return the activations of torch's operations, on every device: gate, up, gelu(gate) and the product."""
        return super().per_token(arch, element_bytes, fused=False)


def unserved(arch: ArchitectureConfig, conditions: Served) -> str:
    """Return the reason why SGLang cannot compute the model. SGLang requires Triton's driver, and ignores parameters
    of the rope."""
    if not conditions.on_cuda:
        return NEEDS_GPU
    return unread_ties(arch) or unread_rope(arch, ("default",))


def activation(c: HFConfig) -> Fields:
    """Return the activation under SGLang's name."""
    return {"hidden_act": c.hidden_activation}


FAMILY = Family(
    "gemma2",
    reads=(decoder, no_attention_bias, gemma, window_by_layer_types),
    blocks=(NormedAttention(), GeluMlp()),
    unserved=unserved,
    extra_config=activation,
)
