"""The shape of a small model, for settings that require one."""

from __future__ import annotations

from megappo.families.architecture import ModelShape

SHAPE = ModelShape(
    family="qwen2",
    hidden_size=64,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=97,
    max_position_embeddings=256,
    tied_embeddings=False,
)
