"""Mixtral: Mistral with experts in every layer, which files call `block_sparse_moe`, and their matrices w1, w3 and
w2."""

from __future__ import annotations

from typing import Any

from megappo.families.architecture import ArchitectureConfig
from megappo.families.blocks import Attention, Experts
from megappo.families.declaration import Family, Served, unread_window
from megappo.families.reading import decoder, expert_counts, no_attention_bias, silu_mlp, window_of_every_layer


def top_experts(c: Any) -> dict[str, Any]:
    """The weights of a token's experts always sum to 1. Raises ValueError for noise, which transformers adds to what
    its routers see in training alone."""
    if c.router_jitter_noise:
        raise ValueError(
            f"router_jitter_noise {c.router_jitter_noise} trains a policy that is not the one that samples; set it to 0"
        )
    return expert_counts(c, "num_local_experts")


def unserved(arch: ArchitectureConfig, asked: Served) -> str:
    """What SGLang's Mixtral does not read of config.json."""
    rope = arch.hf_config.rope_parameters["rope_type"]
    unread = {
        f"rope type '{rope}'": rope != "default",
        f"head_dim {arch.head_dim}": arch.head_dim * arch.heads != arch.hidden_size,
    }
    found = [words for words, there in unread.items() if there]
    words = f"SGLang's Mixtral takes no account of {' or '.join(found)} in config.json" if found else ""
    return unread_window(arch, asked) or words


FAMILY = Family(
    "mixtral",
    reads=(decoder, silu_mlp, no_attention_bias, window_of_every_layer, top_experts),
    blocks=(Attention(), Experts(stored="block_sparse_moe", matrices=("w1", "w3", "w2"))),
    unserved=unserved,
)
