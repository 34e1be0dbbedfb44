"""Mixtral: Mistral with experts in every layer. Files store the experts as `block_sparse_moe` with the matrices w1,
w3 and w2."""

from __future__ import annotations

from megappo.families.blocks import Attention, Experts
from megappo.families.declaration import ArchitectureConfig, Family
from megappo.families.fields import Fields, HFConfig
from megappo.families.reading import decoder, expert_counts, no_attention_bias, silu_mlp, window_of_every_layer
from megappo.families.served import Served, unread_rope, unread_ties, unread_window


def top_experts(c: HFConfig) -> Fields:
    """Read the experts. Their weights always sum to 1.

    Raises ValueError for router noise, which transformers adds only in training.
    """
    if c.router_jitter_noise:
        raise ValueError(
            f"router_jitter_noise {c.router_jitter_noise} changes the trained policy, but not the sampling policy; "
            "set it to 0"
        )
    return expert_counts(c, "num_local_experts")


def unserved(arch: ArchitectureConfig, conditions: Served) -> str:
    """Return the reason why SGLang would compute a different model: SGLang ignores some settings and truncates
    rope_theta."""
    if arch.head_dim * arch.heads != arch.hidden_size:
        return f"ignores head_dim {arch.head_dim} of config.json"
    theta = arch.hf_config.rope_parameters["rope_theta"]
    if theta != int(theta):
        return f"truncates rope_theta {theta} of config.json to {int(theta)}"
    return unread_ties(arch) or unread_window(arch, conditions) or unread_rope(arch, ("default",))


FAMILY = Family(
    "mixtral",
    reads=(decoder, silu_mlp, no_attention_bias, window_of_every_layer, top_experts),
    blocks=(Attention(), Experts(stored="block_sparse_moe", matrices=("w1", "w3", "w2"))),
    unserved=unserved,
)
