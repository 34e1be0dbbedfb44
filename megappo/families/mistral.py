"""Mistral: sliding windows in all layers if config.json sets a window."""

from megappo.families.blocks import Attention, GatedMlp
from megappo.families.declaration import Family
from megappo.families.reading import decoder, no_attention_bias, silu_mlp, window_of_every_layer

FAMILY = Family(
    "mistral",
    reads=(decoder, silu_mlp, no_attention_bias, window_of_every_layer),
    blocks=(Attention(), GatedMlp()),
)
