"""GLM-4.5 to 4.7: experts behind some dense layers, one of them for every token, chosen by sigmoids with a correction
bias, and half of each head rotated. Norms of queries and keys, and biases, are in some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megappo.families.architecture import ArchitectureConfig
from megappo.families.blocks import (
    Attention,
    Experts,
    FirstMlp,
    QueryKeyNorms,
    QueryKeyValueBiases,
    SharedExpert,
)
from megappo.families.declaration import Family, PerToken, Weight
from megappo.families.reading import expert_counts, no_window, partly_rotated_decoder, silu_mlp


def experts(c: Any) -> dict[str, Any]:
    """Experts behind the first layers. Raises ValueError for those that Megatron would weigh otherwise, and for layers
    that are all dense."""
    if (c.n_group, c.topk_group) != (1, 1):
        raise ValueError(f"n_group {c.n_group}, topk_group {c.topk_group} is not supported; use a model with 1 and 1")
    if not c.norm_topk_prob:
        raise ValueError("norm_topk_prob: false is not supported for this family; use a model with true")
    if c.num_experts_per_tok < 2:
        raise ValueError(f"num_experts_per_tok {c.num_experts_per_tok} is not supported; use a model with at least 2")
    if c.n_shared_experts < 1:
        raise ValueError(f"n_shared_experts {c.n_shared_experts} is not supported; use a model with at least 1")
    if not 0 <= c.first_k_dense_replace < c.num_hidden_layers:
        raise ValueError(
            f"first_k_dense_replace {c.first_k_dense_replace} leaves none of num_hidden_layers {c.num_hidden_layers} "
            "with experts; use a model that has some"
        )
    return {
        **expert_counts(c, "num_local_experts"),
        "ffn_hidden_size": c.moe_intermediate_size,
        "dense_layers": c.first_k_dense_replace,
        "dense_ffn_hidden_size": c.intermediate_size if c.first_k_dense_replace else 0,
        "shared_ffn_hidden_size": c.moe_intermediate_size * c.n_shared_experts,
        "sigmoid_router": True,
        "experts_scale": c.routed_scaling_factor,
    }


class Biases(QueryKeyValueBiases):
    """Where `attention_bias` says so."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        return super().weights(arch) if arch.hf_config.attention_bias else ()

    def megatron(self, arch: ArchitectureConfig) -> dict[str, Any]:
        return super().megatron(arch) if arch.hf_config.attention_bias else {}


class Norms(QueryKeyNorms):
    """Where `use_qk_norm` says so."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        return super().weights(arch) if arch.hf_config.use_qk_norm else ()

    def megatron(self, arch: ArchitectureConfig) -> dict[str, Any]:
        return super().megatron(arch) if arch.hf_config.use_qk_norm else {}

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        used = arch.hf_config.use_qk_norm
        return super().per_token(arch, element_bytes, fused=fused) if used else PerToken()


def next_token_layers(arch: ArchitectureConfig) -> list[str]:
    """Those that predict further tokens stand behind the others, and are not the model's."""
    return [f"model.layers.{arch.layers + n}." for n in range(arch.hf_config.num_mtp_layers)]


def without_next_token_layers(c: Any) -> dict[str, Any]:
    """An export has none."""
    return {"num_mtp_layers": 0}


FAMILY = Family(
    "glm4_moe",
    reads=(partly_rotated_decoder, silu_mlp, no_window, experts),
    blocks=(Attention(), Biases(), Norms(), FirstMlp(), Experts(), SharedExpert()),
    further=without_next_token_layers,
    passed_over=next_token_layers,
)
