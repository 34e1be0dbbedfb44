"""Dense language model of Qwen3.5: the layers of Qwen3-Next. Files store the input matrices of linear attention
separately."""

from __future__ import annotations

from dataclasses import replace

from megappo.families import qwen3_next
from megappo.families.architecture import DeltaNet
from megappo.families.blocks import GatedMlp
from megappo.families.declaration import ArchitectureConfig, Weight
from megappo.families.qwen3_next import AttentionNorms, GatedAttention, LinearAttention, delta_net
from megappo.families.reading import no_attention_bias, partly_rotated_decoder, silu_mlp
from megappo.families.served import Served


class SplitLinearAttention(LinearAttention):
    """Linear attention with separate matrices: one for queries, keys and values, one for the gates of values, one
    for strengths, and one for decays."""

    def inputs(self, arch: ArchitectureConfig, net: DeltaNet) -> tuple[Weight, Weight]:
        qkv = (net.key_width, net.key_width, net.value_width)
        of_tensors = {"qkv": qkv, "z": (net.value_width,), "b": (net.value_heads,), "a": (net.value_heads,)}
        weights = []
        for name, parts in (("in_proj", ("qkv", "z")), ("gates_proj", ("b", "a"))):
            sections = tuple(of_tensors[part] for part in parts)
            shapes = [(sum(rows), arch.hidden_size) for rows in sections]
            tensors = {f"linear_attn.in_proj_{part}.weight": shape for part, shape in zip(parts, shapes, strict=True)}
            weights.append(Weight(f"self_attention.{name}.weight", tensors, "grouped", sections=sections))
        return weights[0], weights[1]


def passed_over(arch: ArchitectureConfig) -> tuple[str, ...]:
    """Return the name prefix of image tensors."""
    return ("model.visual.",)


def unserved(arch: ArchitectureConfig, conditions: Served) -> str:
    """Return the reason: SGLang supports Qwen3.5 only with images."""
    return "supports Qwen3.5 only with images"


FAMILY = replace(
    qwen3_next.FAMILY,
    model_type="qwen3_5_text",
    reads=(partly_rotated_decoder, silu_mlp, no_attention_bias, delta_net),
    blocks=(GatedAttention(), AttentionNorms(), SplitLinearAttention(), GatedMlp()),
    unserved=unserved,
    passed_over=passed_over,
    stored_prefix="model.language_model.",
)
