"""Numbers of elements of weights and adapters on one tensor parallel rank, in total or frozen."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

from megappo.families.adapters import LoraShape, adapter_parameters
from megappo.families.declaration import ArchitectureConfig
from megappo.families.frozen import frozen_parameters
from megappo.families.parameters import EMBEDDING, OUTPUT_LAYER, model_parameters, shard_shape

FIRST = -1
"""Key for parameters before all layers, used instead of a layer number. Parameters after all layers have the number of
layers as their key."""


@lru_cache(maxsize=4096)
def stage_parameters(
    arch: ArchitectureConfig,
    tp: int,
    stage_layers: tuple[int, ...],
    padded_vocab: int,
    is_critic: bool,
    special_layers: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """Return the number of parameters without experts on one tensor parallel rank of each pipeline stage, counted from
    the map that loads them.

    `stage_layers` is the number of layers of each stage. `special_layers` is the number of special layers of each
    stage; if empty, all layers have the same size. Under a pipeline, tied embeddings are on the first stage and again
    on the last stage. A critic has a value head of hidden size + 1 instead of the output layer.
    """
    counts = {p: math.prod(shard_shape(arch, p, tp, padded_vocab)) for p in model_parameters(arch, experts=())}
    of_layers = Counter[int | None]()
    for parameter, count in counts.items():
        of_layers[parameter.layer] += count
    usual = next(n for n in range(arch.layers) if n not in arch.special_layers)
    each, other = of_layers[usual], of_layers[next(iter(arch.special_layers), usual)]
    special_of = special_layers or (0,) * len(stage_layers)
    stages = [special * other + (n - special) * each for n, special in zip(stage_layers, special_of, strict=True)]
    for parameter, count in counts.items():
        if parameter.megatron == EMBEDDING:
            stages[0] += count
            if arch.tied_embeddings and len(stages) > 1 and not is_critic:
                stages[-1] += count
        elif parameter.layer is None and not (is_critic and parameter.megatron == OUTPUT_LAYER):
            stages[-1] += count
    if is_critic:
        stages[-1] += arch.hidden_size + 1
    return tuple(stages)


@lru_cache(maxsize=256)
def layer_adapters(arch: ArchitectureConfig, lora: LoraShape, tp: int, layer: int) -> int:
    """Return the number of elements of a layer's adapters on one tensor parallel rank, without adapters of experts."""
    adapters = [p for p in adapter_parameters(arch, lora, experts=()) if p.layer == layer]
    return sum(math.prod(shard_shape(arch, p, tp, arch.vocab_size)) for p in adapters)


@lru_cache(maxsize=256)
def adapter_elements(arch: ArchitectureConfig, lora: LoraShape) -> int:
    """Return the number of elements of all adapters."""
    first = adapter_parameters(arch, lora, experts=range(min(1, arch.experts)))  # all experts have the same size
    return sum(p.elements * (1 if p.expert is None else arch.experts) for p in first)


@lru_cache(maxsize=256)
def largest_adapter(arch: ArchitectureConfig, lora: LoraShape, tp: int, experts_per_rank: int) -> int:
    """Return the number of elements of the largest A or B on one tensor parallel rank. The A (or B) matrices of all
    experts of a rank in a layer count as one parameter."""
    every = adapter_parameters(arch, lora, experts=range(min(1, arch.experts)))
    adapters = [p for p in every if p.layer in (0, arch.layers - 1)]
    counts = [1 if p.expert is None else experts_per_rank for p in adapters]
    return max(n * math.prod(shard_shape(arch, p, tp, arch.vocab_size)) for n, p in zip(counts, adapters, strict=True))


@lru_cache(maxsize=64)
def frozen_elements(
    arch: ArchitectureConfig, freeze: tuple[str, ...], lora: LoraShape | None, tp: int, padded_vocab: int
) -> tuple[Counter[int], Counter[int]]:
    """Return two counters by layer for one tensor parallel rank: elements of frozen dense weights, and elements of the
    frozen weights of one expert. With `lora`, count the adapters of the frozen weights instead."""
    dense, of_expert = Counter[int](), Counter[int]()
    for parameter in frozen_parameters(arch, freeze, lora):
        count = math.prod(shard_shape(arch, parameter, tp, padded_vocab))
        if parameter.layer is None:
            dense[FIRST if parameter.megatron == EMBEDDING else arch.layers] += count
        elif parameter.expert is None:
            dense[parameter.layer] += count
        elif parameter.expert == 0:
            of_expert[parameter.layer] += count
    return dense, of_expert
