"""Numbers of weights, counted from the map that loads them."""

from __future__ import annotations

import math
from functools import lru_cache

from megappo.architecture import ArchitectureConfig
from megappo.reshard.hf_map import hf_shape, model_parameters, multiplied_parameters


@lru_cache(maxsize=64)
def model_sizes(arch: ArchitectureConfig) -> tuple[int, int, int]:
    """(all weights of the Hugging Face model, those of the layers, those of the output matrix)."""
    total = sum(math.prod(hf_shape(arch, name)) for p in model_parameters(arch, experts=()) for name in p.hf)
    total += arch.layers * arch.experts * arch.expert_parameters
    head = arch.vocab_size * arch.hidden_size
    return total, multiplied_parameters(arch) - head, head


@lru_cache(maxsize=64)
def largest_tensor(arch: ArchitectureConfig) -> int:
    """Elements that the weight stream moves at once at least: the largest Megatron parameter, whole."""
    return max(sum(math.prod(hf_shape(arch, name)) for name in p.hf) for p in model_parameters(arch, experts=(0,)))
