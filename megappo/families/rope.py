"""Rotary positions (rope): which variants of config.json are built, and which are refused."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megappo.families.architecture import ArchitectureConfig


def rotary(arch: ArchitectureConfig) -> tuple[tuple[Tensor, ...], float]:
    """Inverse frequencies of each kind of rope, (rotated channels/2,), and the factor on cosine and sine, as
    transformers computes them.

    Not by Megatron's own scaling, which knows Llama 3's constants only.
    """
    kinds = rope_kinds(arch)
    found = [_of_kind(arch, kind) for kind in kinds] if kinds else [_of_kind(arch, None)]
    assert len({scale for _, scale in found}) == 1, "one factor for all layers"
    return tuple(frequencies for frequencies, _ in found), found[0][1]


def rope_kinds(arch: ArchitectureConfig) -> tuple[str, ...]:
    """The kinds of rope in a model's layers, in the order of `rotary`; empty: there is one rope."""
    return tuple(sorted(set(arch.beyond.ropes)))


def _of_kind(arch: ArchitectureConfig, kind: str | None) -> tuple[Tensor, float]:
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
