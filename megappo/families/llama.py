"""Llama, and models with its `model_type`, such as SmolLM2."""

from megappo.families.blocks import Attention, GatedMlp
from megappo.families.declaration import Family
from megappo.families.reading import decoder, no_attention_bias, no_window, silu_mlp

FAMILY = Family(
    "llama",
    reads=(decoder, silu_mlp, no_attention_bias, no_window),
    blocks=(Attention(), GatedMlp()),
)
