"""Qwen3 with experts, such as Qwen3-30B-A3B. A window applies to every layer; in Qwen3 a window applies to the
layers of `layer_types`."""

from megappo.families.blocks import Attention, Experts, QueryKeyNorms
from megappo.families.declaration import Family
from megappo.families.reading import decoder, experts, no_attention_bias, silu_mlp, window_of_every_layer

FAMILY = Family(
    "qwen3_moe",
    reads=(decoder, silu_mlp, no_attention_bias, experts, window_of_every_layer),
    blocks=(Attention(), Experts(), QueryKeyNorms()),
    attends_in_groups=True,
)
