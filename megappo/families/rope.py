"""Rotary positions (rope): which variants of config.json are built, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megappo.families.architecture import ArchitectureConfig
from megappo.families.served import yarn_scale

if TYPE_CHECKING:  # plans read factors without importing torch
    from torch import Tensor


def rotary(arch: ArchitectureConfig) -> tuple[tuple[Tensor, ...], float]:
    """Inverse frequencies of each kind of rope, (rotated channels/2,), and the factor on cosine and sine, as
    transformers computes them.

    Not by Megatron's own scaling, which knows Llama 3's constants only.
    """
    kinds = rope_kinds(arch)
    found = [_of_kind(arch, kind) for kind in kinds] if kinds else [_of_kind(arch, None)]
    assert len({scale for _, scale in found}) == 1, "one factor for all layers"
    return tuple(frequencies for frequencies, _ in found), found[0][1]


def rotary_scale(arch: ArchitectureConfig) -> float:
    """The factor on cosine and sine that `rotary` has."""
    said = arch.hf_config.rope_parameters
    (scale,) = {_scale(arch, rope) for rope in [said[kind] for kind in rope_kinds(arch)] or [said]}
    return scale


def _scale(arch: ArchitectureConfig, rope: Mapping[str, Any]) -> float:
    if rope["rope_type"] != "yarn":
        return 1.0
    if rope["factor"] is None:
        stretch = arch.hf_config.max_position_embeddings / rope["original_max_position_embeddings"]
        return yarn_scale({**rope, "factor": stretch})
    return yarn_scale(rope)


def rope_kinds(arch: ArchitectureConfig) -> tuple[str, ...]:
    """The kinds of rope in a model's layers, in the order of `rotary`; empty: there is one rope."""
    return tuple(sorted(set(arch.extensions.ropes)))


def _of_kind(arch: ArchitectureConfig, kind: str | None) -> tuple[Tensor, float]:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said = arch.hf_config.rope_parameters
    rope = said if kind is None else said[kind]
    if rope["rope_type"] == "default":
        channels = arch.rotary_channels or arch.head_dim
        exponents = torch.arange(0, channels, 2, dtype=torch.int64).float() / channels
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    of_layers = {} if kind is None else {"layer_type": kind}
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    with torch.device("cpu"):  # some make tensors on the default device
        inverse_frequencies, scale = compute(arch.hf_config, torch.device("cpu"), **of_layers)
    return inverse_frequencies, float(scale)
