"""GLM-4.5 to 4.7: experts after some dense layers, with sigmoid routers, a correction bias and one shared expert.
Rope rotates half of each head. Some models have norms or biases of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

from megappo.families.blocks import Attention, Experts, FirstMlp, QueryKeyNorms, QueryKeyValueBiases, SharedExpert
from megappo.families.declaration import (
    ArchitectureConfig,
    Family,
    PerToken,
    Weight,
    next_token_layers,
    without_next_token_layers,
)
from megappo.families.fields import MegatronSettings
from megappo.families.reading import biased_experts, no_window, partly_rotated_decoder, silu_mlp


class Biases(QueryKeyValueBiases):
    """Biases of queries, keys and values, where `attention_bias` is true."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        return super().weights(arch) if arch.hf_config.attention_bias else ()

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return super().megatron(arch) if arch.hf_config.attention_bias else {}


class Norms(QueryKeyNorms):
    """Norms of queries and keys, where `use_qk_norm` is true."""

    def weights(self, arch: ArchitectureConfig) -> Sequence[Weight]:
        return super().weights(arch) if arch.hf_config.use_qk_norm else ()

    def megatron(self, arch: ArchitectureConfig) -> MegatronSettings:
        return super().megatron(arch) if arch.hf_config.use_qk_norm else {}

    def per_token(self, arch: ArchitectureConfig, element_bytes: int, *, fused: bool) -> PerToken:
        used = arch.hf_config.use_qk_norm
        return super().per_token(arch, element_bytes, fused=fused) if used else PerToken()


FAMILY = Family(
    "glm4_moe",
    reads=(partly_rotated_decoder, silu_mlp, no_window, biased_experts),
    blocks=(Attention(), Biases(), Norms(), FirstMlp(), Experts(wide_router=True), SharedExpert()),
    extra_config=without_next_token_layers,
    mtp_layers=next_token_layers,
    mtp_count_field="num_mtp_layers",
)
