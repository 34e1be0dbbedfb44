"""The language model of Qwen3.5 with experts, chosen and shared as Qwen3-Next's."""

from __future__ import annotations

from megappo.families.blocks import Experts
from megappo.families.declaration import Family
from megappo.families.fields import Fields, HFConfig
from megappo.families.qwen3_5_text import PREFIX, SplitLinearAttention, passed_over, unserved
from megappo.families.qwen3_next import (
    MTP_COUNT_FIELD,
    AttentionNorms,
    GatedAttention,
    GatedSharedExpert,
    delta_net,
    full_attention_interval,
    mtp_layers,
    shared_expert,
)
from megappo.families.reading import expert_counts, no_attention_bias, partly_rotated_decoder, silu_mlp


def experts(c: HFConfig) -> Fields:
    """Read the experts of every layer, whose weights transformers normalises to sum to 1."""
    return {**expert_counts(c, "num_experts"), "ffn_hidden_size": c.moe_intermediate_size}


FAMILY = Family(
    "qwen3_5_moe_text",
    reads=(partly_rotated_decoder, silu_mlp, no_attention_bias, experts, shared_expert, delta_net),
    blocks=(GatedAttention(), AttentionNorms(), SplitLinearAttention(), Experts(), GatedSharedExpert()),
    unserved=unserved,
    adapted=False,
    extra_config=full_attention_interval,
    mtp_layers=mtp_layers,
    mtp_count_field=MTP_COUNT_FIELD,
    passed_over=passed_over,
    stored_prefix=PREFIX,
    fingerprinted=False,
)
