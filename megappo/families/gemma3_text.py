"""Gemma 3, the language model: Gemma 2 without its cap on scores, with norms of queries and keys, windows in most
layers, and another rope in the layers that have them."""

from __future__ import annotations

from dataclasses import replace

from megappo.families.architecture import ArchitectureConfig
from megappo.families.blocks import QueryKeyNorms
from megappo.families.declaration import Family
from megappo.families.fields import Fields, HFConfig
from megappo.families.gemma2 import GeluMlp, NormedAttention, activation, gemma
from megappo.families.reading import decoder, no_attention_bias, window_by_layer_types
from megappo.families.served import Served

_ROPES = ("default", "linear")


def gemma3(c: HFConfig) -> Fields:
    """Read the rope of each layer. Raises ValueError for ropes that scale more than positions, and for a cap on scores,
    which transformers reads and does not compute."""
    if c.attn_logit_softcapping is not None:
        raise ValueError(
            f"attn_logit_softcapping {c.attn_logit_softcapping} means nothing to transformers for {c.model_type}; set "
            "it to null, or use the model_type whose attention has the cap"
        )
    other = [rope["rope_type"] for rope in c.rope_parameters.values() if rope["rope_type"] not in _ROPES]
    if other:
        raise ValueError(f"rope type '{other[0]}' is not supported for this family; use one of {', '.join(_ROPES)}")
    found = gemma(c)
    return {**found, "extensions": replace(found["extensions"], ropes=tuple(c.layer_types))}


def unserved(arch: ArchitectureConfig, asked: Served) -> str:
    """The first reason was found by the probe of a weight sync. A server computes the rope of layers without a window
    by transformers, and that of layers with one from its base alone."""
    if not asked.on_cuda:
        return "is 0.3 nats and more off on a CPU, and the run is on one"
    kind = arch.hf_config.rope_parameters["sliding_attention"]["rope_type"]
    if kind != "default":
        return f"takes no account of rope type '{kind}' of sliding_attention in config.json"
    return ""


FAMILY = Family(
    "gemma3_text",
    reads=(decoder, no_attention_bias, gemma3, window_by_layer_types),
    blocks=(NormedAttention(), GeluMlp(), QueryKeyNorms()),
    unserved=unserved,
    extra_config=activation,
)
