"""Qwen3: queries and keys have norms."""

from megappo.families.blocks import Attention, GatedMlp, QueryKeyNorms
from megappo.families.declaration import Family
from megappo.families.reading import decoder, no_attention_bias, silu_mlp, window_by_layer_types

FAMILY = Family(
    "qwen3",
    reads=(decoder, silu_mlp, no_attention_bias, window_by_layer_types),
    blocks=(Attention(), GatedMlp(), QueryKeyNorms()),
    attends_in_groups=True,
)
