"""Qwen2 and Qwen2.5: queries, keys and values always have biases."""

from megappo.families.blocks import Attention, GatedMlp, QueryKeyValueBiases
from megappo.families.declaration import Family
from megappo.families.reading import decoder, silu_mlp, window_by_layer_types

FAMILY = Family(
    "qwen2",
    reads=(decoder, silu_mlp, window_by_layer_types),
    blocks=(Attention(), GatedMlp(), QueryKeyValueBiases()),
)
