"""Gemma 3, the language model: Gemma 2 without the cap on scores, with norms of queries and keys. Most layers have a
window, and these layers use a different rope."""

from __future__ import annotations

from dataclasses import replace

from megappo.families.blocks import QueryKeyNorms
from megappo.families.declaration import ArchitectureConfig, Family
from megappo.families.fields import Fields, HFConfig
from megappo.families.gemma2 import GeluMlp, NormedAttention, activation, gemma
from megappo.families.reading import decoder, no_attention_bias, window_by_layer_types
from megappo.families.served import Served

_ROPES = ("default", "linear")


def gemma3(c: HFConfig) -> Fields:
    """Read the rope of each layer.

    Raises ValueError for ropes that scale more than positions. Also raises ValueError for a cap on scores, which
    transformers reads but does not apply.
    """
    if c.attn_logit_softcapping is not None:
        raise ValueError(
            f"attn_logit_softcapping {c.attn_logit_softcapping} is ignored by transformers for {c.model_type}; set "
            "it to null, or use a model_type with capped attention scores"
        )
    other = [rope["rope_type"] for rope in c.rope_parameters.values() if rope["rope_type"] not in _ROPES]
    if other:
        raise ValueError(f"rope type '{other[0]}' is not supported for this family; use one of {', '.join(_ROPES)}")
    fields = gemma(c)
    return {**fields, "extensions": replace(fields["extensions"], ropes=tuple(c.layer_types))}


def unserved(arch: ArchitectureConfig, conditions: Served) -> str:
    """Return the reason why SGLang computes a different model. The probe of a weight sync measured the difference on
    CPUs. On GPUs, SGLang uses transformers for the rope of layers without a window. For layers with a window, SGLang
    uses only the base of the rope."""
    if not conditions.on_cuda:
        return "has errors of at least 0.3 nats on a CPU, and the run is on a CPU"
    kind = arch.hf_config.rope_parameters["sliding_attention"]["rope_type"]
    if kind != "default":
        return f"ignores rope type '{kind}' of sliding_attention in config.json"
    return ""


FAMILY = Family(
    "gemma3_text",
    reads=(decoder, no_attention_bias, gemma3, window_by_layer_types),
    blocks=(NormedAttention(), GeluMlp(), QueryKeyNorms()),
    unserved=unserved,
    extra_config=activation,
)
