"""Language model of Qwen3.5 with experts, including a shared expert, as in Qwen3-Next."""

from __future__ import annotations

from dataclasses import replace

from megappo.families import qwen3_5_text
from megappo.families.blocks import Experts
from megappo.families.fields import Fields, HFConfig
from megappo.families.qwen3_5_text import SplitLinearAttention
from megappo.families.qwen3_next import AttentionNorms, GatedAttention, GatedSharedExpert, delta_net, shared_expert
from megappo.families.reading import expert_counts, no_attention_bias, partly_rotated_decoder, silu_mlp


def experts(c: HFConfig) -> Fields:
    """Read the experts of every layer. transformers normalises their weights to sum to 1."""
    return {**expert_counts(c, "num_experts"), "ffn_hidden_size": c.moe_intermediate_size}


FAMILY = replace(
    qwen3_5_text.FAMILY,
    model_type="qwen3_5_moe_text",
    reads=(partly_rotated_decoder, silu_mlp, no_attention_bias, experts, shared_expert, delta_net),
    blocks=(GatedAttention(), AttentionNorms(), SplitLinearAttention(), Experts(), GatedSharedExpert()),
)
