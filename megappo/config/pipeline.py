"""Number of layers in each chunk of a pipeline.

Chunks have Megatron's order, which is the order of a forward pass. With p stages, chunk c of stage s has the number c
p + s. Without interleaving, a stage is one chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from megappo.config.schema import Config
from megappo.config.sections.roles import ActorSettings, CriticSettings
from megappo.families.declaration import ArchitectureConfig
from megappo.families.flops import update_flops


def chunk_layers(
    config: Config, name: str, settings: ActorSettings | CriticSettings, arch: ArchitectureConfig
) -> tuple[int, ...] | None:
    """Return the number of layers of each chunk of a role (`layout.pipeline_layers`), or None for equal numbers.

    `name` is `actor` or `critic`. A reference has the settings of the actor.
    """
    layout = settings.layout
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline_chunks
    if isinstance(layout.pipeline_layers, tuple):
        return layout.pipeline_layers
    if stages == 1 or (layout.pipeline_layers == "auto" and arch.layers % (stages * chunks) == 0):
        return None
    tokens = config.max_sequence_tokens
    layer, head = update_flops(
        arch,
        tokens,
        is_critic=name == "critic",
        recompute=settings.recompute,
        recompute_modules=settings.recompute_modules,
    )
    share = min(config.rollout.max_response_tokens, tokens) / tokens
    return balanced_layers(arch.layers, stages, chunks, head_in_layers=head * share / layer)


def even_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Return equal numbers of layers for each chunk."""
    assert layers % chunks == 0, f"{layers} layers, {chunks} chunks"
    return (layers // chunks,) * chunks


def stage_layers(chunk_layers: Sequence[int], stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the layer indices of each stage, chunk by chunk. `chunk_layers` is the number of layers of each chunk."""
    ends = list(itertools.accumulate(chunk_layers))
    of_chunks = [range(end - count, end) for end, count in zip(ends, chunk_layers, strict=True)]
    return tuple(tuple(n for chunk in of_chunks[stage::stages] for n in chunk) for stage in range(stages))


@lru_cache(maxsize=256)
def balanced_layers(layers: int, stages: int, chunks: int, *, head_in_layers: float) -> tuple[int, ...]:
    """Return the number of layers of each of `stages` x `chunks` chunks.

    Each chunk has at least one layer. The result minimizes the maximum work of a stage, and then the maximum work of a
    chunk within a stage. `head_in_layers` is the additional work of the head in the last chunk, in units of a layer.
    The embedding is a table lookup without work. Among equal stages, the later stage gets the next layer, because the
    later stage holds fewer microbatches and no embedding.

    Adding each layer to the stage with the least work is optimal, because all layers have equal work (Graham 1969).
    """
    counts = [1] * (stages * chunks)

    def work(numbers: range) -> float:
        return sum(counts[n] for n in numbers) + (head_in_layers if numbers[-1] == len(counts) - 1 else 0.0)

    for _ in range(layers - len(counts)):
        stage = min(range(stages), key=lambda s: (work(range(s, len(counts), stages)), -s))
        counts[min(range(stage, len(counts), stages), key=lambda n: (work(range(n, n + 1)), -n))] += 1
    return tuple(counts)
