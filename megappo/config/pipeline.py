"""The number of layers in each chunk of a pipeline.

Chunks are numbered in the order in which a token passes them, which is Megatron's: of p stages, chunk c of stage s is
number c p + s. Without interleaving a stage is one chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from megappo.config.roles import ActorSettings, CriticSettings
from megappo.config.schema import Config
from megappo.families.architecture import ArchitectureConfig
from megappo.families.flops import update_flops


def chunk_layers(
    config: Config, name: str, settings: ActorSettings | CriticSettings, arch: ArchitectureConfig
) -> tuple[int, ...] | None:
    """Layers of each chunk of a role with such settings and such a model, as `layout.pipeline_layers` says; None:
    equally many. `name` is `actor` or `critic`; a reference has the actor's settings."""
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
    """Layers of each chunk, equally many in each."""
    assert layers % chunks == 0, f"{layers} layers, {chunks} chunks"
    return (layers // chunks,) * chunks


def stage_layers(chunk_layers: Sequence[int], stages: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of the layers of each stage, chunk by chunk; `chunk_layers`: how many each chunk has."""
    ends = list(itertools.accumulate(chunk_layers))
    of_chunks = [range(end - count, end) for end, count in zip(ends, chunk_layers, strict=True)]
    return tuple(tuple(n for chunk in of_chunks[stage::stages] for n in chunk) for stage in range(stages))


@lru_cache(maxsize=256)
def balanced_layers(layers: int, stages: int, chunks: int, *, head_in_layers: float) -> tuple[int, ...]:
    """Layers of each of `stages` x `chunks` chunks, one at least, so that the stage with most work has the least
    possible, and within a stage the chunk with most.

    `head_in_layers`: work of the head, which the last chunk has besides, in layers. An embedding is looked up and has
    none. Of equal stages the later gets a layer more: it holds fewer microbatches at once, and no embedding.

    Giving each layer to the stage with least work is optimal, as all layers are the same (Graham 1969).
    """
    counts = [1] * (stages * chunks)

    def work(numbers: range) -> float:
        return sum(counts[n] for n in numbers) + (head_in_layers if numbers[-1] == len(counts) - 1 else 0.0)

    for _ in range(layers - len(counts)):
        stage = min(range(stages), key=lambda s: (work(range(s, len(counts), stages)), -s))
        counts[min(range(stage, len(counts), stages), key=lambda n: (work(range(n, n + 1)), -n))] += 1
    return tuple(counts)
