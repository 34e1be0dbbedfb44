"""Numbers of weights, counted from the map that loads them, and how bytes are worded."""

from __future__ import annotations

import math
from functools import lru_cache

from megappo.families.architecture import ArchitectureConfig
from megappo.families.parameters import expert_parameters, model_parameters, multiplied_parameters, shard_shape


@lru_cache(maxsize=64)
def model_sizes(arch: ArchitectureConfig) -> tuple[int, int, int]:
    """(all weights of the Hugging Face model, those of the layers, those of the output matrix)."""
    total = sum(p.elements for p in model_parameters(arch, experts=()))
    total += len(arch.expert_layers) * arch.experts * expert_parameters(arch)
    head = arch.vocab_size * arch.hidden_size
    return total, multiplied_parameters(arch) - head, head


@lru_cache(maxsize=64)
def largest_tensor(arch: ArchitectureConfig) -> int:
    """Elements that the weight stream moves at once at least: the largest Megatron parameter, whole."""
    return max(p.elements for p in model_parameters(arch, experts=(0,)))


@lru_cache(maxsize=64)
def whole_parameters(arch: ArchitectureConfig) -> int:
    """Weights that every tensor parallel rank holds all of: norms and routers."""
    return sum(p.elements for p in model_parameters(arch, experts=()) if p.axis is None)


@lru_cache(maxsize=256)
def largest_of_layer(arch: ArchitectureConfig, tp: int, experts_here: int) -> int:
    """Elements of the largest weight of a layer on one tensor parallel rank, which has its experts in one."""
    here = [p for p in model_parameters(arch, experts=(0,)) if p.layer in (0, arch.layers - 1)]
    shapes = [shard_shape(arch, p, tp, arch.vocab_size) for p in here]
    held = [1 if p.expert is None else experts_here for p in here]
    return max(n * math.prod(shape) for n, shape in zip(held, shapes, strict=True))


def size_words(n_bytes: float) -> str:
    """`1.5 GB` or `20.0 MB`."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
