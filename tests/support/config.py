"""The shape of a small model, for settings that require one."""

from __future__ import annotations

from dataclasses import replace

from megappo.families.architecture import ModelShape

SHAPE = ModelShape(
    family="qwen2", hidden_size=64, layers=4, heads=4, kv_heads=2, head_dim=16, ffn_hidden_size=96, vocab_size=97,
    max_position_embeddings=256, tied_embeddings=False,
)  # fmt: skip
EXPERTS = replace(SHAPE, family="qwen3_moe", experts=8)
TWO_TURNS = (
    "rollout.environment={name: configs/examples/10_tools/lookup.py:Lookup, max_turns: 2, max_turn_tokens: 3}",
    "reward.function=environment",
    "rollout.max_response_tokens=9",
    "data.max_prompt_tokens=4",
    "data.train={source: 'configs/examples/10_tools/lookup.py:keys', options: {held_out: false}}",
)
"""Episodes of two turns and a tool."""
NO_CRITIC = ("critic=null", "algorithm.estimator=grpo")
