"""Rotary positions (rope): which variants of config.json are built, and which are refused."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megappo.families.architecture import ArchitectureConfig


def rotary(arch: ArchitectureConfig) -> tuple[Tensor, float]:
    """Inverse frequencies (head_dim/2,) and the factor on cosine and sine, as transformers computes them.

    Megatron's own scaling knows Llama 3's constants only.
    """
    rope = arch.hf_config.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    inverse_frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](arch.hf_config, torch.device("cpu"))
    return inverse_frequencies, float(scale)
