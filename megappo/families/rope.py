"""Rotary positions (rope): which variants of config.json are built, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from megappo.families.served import yarn_scale

if TYPE_CHECKING:  # plans read factors without importing torch
    from torch import Tensor

    from megappo.families.architecture import ArchitectureConfig


class Rope(NamedTuple):
    """Rotary positions of one kind of layer, as transformers computes them."""

    inverse_frequencies: Tensor
    """(rotated channels/2,), float32, in radians per position."""
    scale: float
    """Factor on cosine and sine (YaRN's temperature). It scales the rotated channels only."""


def rotary(arch: ArchitectureConfig) -> tuple[Rope, ...]:
    """The rope of each kind of layer, in the order of `rope_kinds`; one rope if there are no kinds.

    Megatron-Core's own scaling is not used, because it supports the constants of Llama 3 only.
    """
    return tuple(_of_kind(arch, kind) for kind in rope_kinds(arch) or (None,))


def rotary_scales(arch: ArchitectureConfig) -> tuple[float, ...]:
    """The `scale` of each rope in `rotary`, computed without torch."""
    parameters = arch.hf_config.rope_parameters
    return tuple(_scale(arch, parameters if kind is None else parameters[kind]) for kind in rope_kinds(arch) or (None,))


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


def _of_kind(arch: ArchitectureConfig, kind: str | None) -> Rope:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said = arch.hf_config.rope_parameters
    rope = said if kind is None else said[kind]
    if rope["rope_type"] == "default":
        channels = arch.rotary_channels or arch.head_dim
        exponents = torch.arange(0, channels, 2, dtype=torch.int64).float() / channels
        return Rope(1.0 / (rope["rope_theta"] ** exponents), 1.0)
    of_layers = {} if kind is None else {"layer_type": kind}
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    with torch.device("cpu"):  # some make tensors on the default device
        inverse_frequencies, scale = compute(arch.hf_config, torch.device("cpu"), **of_layers)
    return Rope(inverse_frequencies, float(scale))
