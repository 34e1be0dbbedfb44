"""Rules for the parallel layouts of roles: ranks, model sizes and vocabulary."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from megappo.config.grid import format_rank_list, format_ranks
from megappo.config.rules import experts
from megappo.config.rules.role_spec import RoleSpec
from megappo.config.schema import Config
from megappo.errors import divisors, either, nearest_numbers, show
from megappo.families.architecture import ModelShape, padded_vocab_size


def placement_rules(role: RoleSpec, world_size: int) -> Iterator[str]:
    """Check that a role's ranks exist and divide into complete model replicas."""
    layout, key = role.layout, f"{role.name}.layout"
    if layout.first_rank >= world_size:
        yield (
            f"{key}.first_rank {layout.first_rank} is outside the world of {world_size} ranks; "
            f"set at most {world_size - 1}, or start more processes"
        )
        return
    grid = layout.grid(world_size)
    ranks = grid.ranks
    if ranks[-1] >= world_size:
        yield (
            f"{key}.first_rank {layout.first_rank} + ranks {len(ranks)} = {ranks[-1] + 1} is above the world size "
            f"{world_size}; set {key}.ranks to {world_size - layout.first_rank}, or start {ranks[-1] + 1} processes"
        )
    if len(ranks) % layout.context_parallel:
        nearest = nearest_numbers(layout.context_parallel, divisors(len(ranks)))
        yield (
            f"{key}.context_parallel {layout.context_parallel} does not divide its {len(ranks)} ranks; "
            f"the nearest is {nearest}"
        )
    elif len(ranks) % grid.model_ranks:
        sizes = f"context_parallel {layout.context_parallel} x " if layout.context_parallel > 1 else ""
        sizes += f"tensor_parallel {layout.tensor_parallel} x pipeline_parallel {layout.pipeline_parallel}"
        yield (
            f"{key}.{sizes} = {grid.model_ranks} does not divide its {len(ranks)} ranks; the nearest layouts are "
            f"{_nearest_layouts(role, len(ranks) // layout.context_parallel)}"
        )
    elif len(ranks) // layout.pipeline_parallel % layout.expert_parallel:
        stage = len(ranks) // layout.pipeline_parallel
        nearest = nearest_numbers(layout.expert_parallel, [n for n in divisors(stage) if not role.shape.experts % n])
        yield (
            f"{key}.expert_parallel {layout.expert_parallel} does not divide the {stage} ranks of a pipeline stage; "
            f"the nearest is {nearest}"
        )


def coverage_rules(roles: Collection[RoleSpec], world_size: int) -> Iterator[str]:
    """Check that every rank of the world belongs to a role."""
    covered = {rank for role in roles for rank in role.layout.grid(world_size).ranks}
    idle = [rank for rank in range(world_size) if rank not in covered]
    if not idle:
        return
    layouts = either(f"{role.name}.layout (ranks {format_ranks(role.layout.grid(world_size).ranks)})" for role in roles)
    how = "lower its first_rank" if idle[0] < min(covered) else "`ranks: null` takes all from first_rank"
    remedy = f"widen {layouts}: {how}"
    if idle[0] == len(covered):
        remedy += f", or start {len(covered)} {'process' if len(covered) == 1 else 'processes'}"
    yield f"{format_rank_list(idle)} of the world size {world_size} would stay idle; {remedy}"


def parallel_rules(role: RoleSpec, model_name: str) -> Iterator[str]:
    """Check that tensor and pipeline parallel sizes fit the model.

    Args:
        role: trained role with the layout.
        model_name: `actor`, `critic` or `reference`.
    """
    layout, shape, key = role.layout, role.shape, f"{role.name}.layout"
    tp, pp, vpp = layout.tensor_parallel, layout.pipeline_parallel, layout.virtual_pipeline_chunks
    unfit = [f"{size} ({name})" for name, size in shape.shared_sizes.items() if size % tp]
    if unfit:
        nearest = nearest_numbers(tp, valid_tensor_parallel(shape))
        size_list = f"{either(unfit)} of the {model_name} model"
        yield f"{key}.tensor_parallel {tp} does not divide {size_list}; the nearest is {nearest}"
    if layout.sequence_parallel and tp == 1:
        remedy = "remove it, or set tensor_parallel to 2"
        yield f"{key}.sequence_parallel needs tensor_parallel above 1; {remedy}"
    if vpp > 1 and pp == 1:
        yield (
            f"{key}.virtual_pipeline_chunks {vpp} needs pipeline_parallel above 1; "
            "set virtual_pipeline_chunks to 1 or pipeline_parallel to 2"
        )
    elif shape.layers < pp * vpp:
        yield (
            f"{key}.pipeline_parallel {pp} x virtual_pipeline_chunks {vpp} = {pp * vpp} chunks are more than the "
            f"{shape.layers} layers of the {model_name} model; the nearest are "
            f"{_nearest_pipelines(pp, vpp, shape.layers)}"
        )
    elif isinstance(layout.pipeline_layers, tuple):
        yield from _layer_list_rules(role, layout.pipeline_layers, model_name)
    if shape.delta_net is not None and layout.context_parallel > 1:
        yield (
            f"{key}.context_parallel {layout.context_parallel} splits a sample between ranks, but the linear attention "
            f"of a {shape.family} passes states along the sample; set it to 1, and increase tensor_parallel"
        )
    yield from experts.layout_rules(role, model_name)
    yield from _recompute_rules(role, model_name)


def _layer_list_rules(role: RoleSpec, layer_counts: tuple[int, ...], model_name: str) -> Iterator[str]:
    """Check that a list of layers has one entry per chunk and that the entries add up to all layers of the model."""
    layout, key = role.layout, f"{role.name}.layout"
    pp, vpp = layout.pipeline_parallel, layout.virtual_pipeline_chunks
    if len(layer_counts) != pp * vpp:
        yield (
            f"{key}.pipeline_layers {show(list(layer_counts))} has {len(layer_counts)} entries, must have one for each "
            f"of the pipeline_parallel {pp} x virtual_pipeline_chunks {vpp} = {pp * vpp} chunks; give {pp * vpp}, or "
            "set it to auto"
        )
    elif sum(layer_counts) != role.shape.layers:
        yield (
            f"{key}.pipeline_layers {show(list(layer_counts))} has {sum(layer_counts)} layers, must have the "
            f"{role.shape.layers} of the {model_name} model; change its entries, or set it to auto"
        )


def _recompute_rules(role: RoleSpec, model_name: str) -> Iterator[str]:
    """Check that the modules for recomputation exist in the model's layers."""
    settings = role.settings
    absent, present = ("mlp", "moe") if role.shape.experts else ("moe", "mlp")
    if settings.recompute == "selective" and not settings.recompute_modules:
        yield f"{role.name}.recompute is selective and recompute_modules empty; set recompute to none, or name a module"
    if settings.recompute == "selective" and absent in settings.recompute_modules:
        yield (
            f"{role.name}.recompute_modules has {absent}, which layers of the {model_name} model do not have; "
            f"write {present}"
        )


def vocabulary_rules(config: Config, roles: Collection[RoleSpec]) -> Iterator[str]:
    """Check that tensor parallel ranks divide the padded vocabulary evenly."""
    multiple = config.model.pad_vocab_to_multiple_of
    if multiple == 1:
        return
    common = math.lcm(*(role.layout.tensor_parallel for role in roles))
    for role in roles:
        tp = role.layout.tensor_parallel
        padded = padded_vocab_size(role.shape.vocab_size, tp, multiple)
        if padded % tp:
            below, above = multiple // common * common, -(-multiple // common) * common
            yield (
                f"model.pad_vocab_to_multiple_of {multiple} pads the vocabulary to {padded}, which "
                f"{role.name}.layout.tensor_parallel {tp} does not divide; the nearest is "
                f"{nearest_numbers(multiple, [n for n in (1, below, above) if n > 0])}"
            )


def valid_tensor_parallel(shape: ModelShape) -> list[int]:
    """Return the tensor parallel sizes that a model supports, in ascending order."""
    return divisors(math.gcd(*shape.shared_sizes.values()))


def _nearest_layouts(role: RoleSpec, ranks: int) -> str:
    """Return the two tensor x pipeline sizes that divide `ranks`, fit the model and are nearest to the role's sizes."""
    tp, pp = role.layout.tensor_parallel, role.layout.pipeline_parallel
    fitting = [
        (t, p) for t in valid_tensor_parallel(role.shape) for p in divisors(role.shape.layers) if ranks % (t * p) == 0
    ]
    return _nearest_pairs((tp, pp), fitting)


def _nearest_pipelines(pp: int, vpp: int, layers: int) -> str:
    """Return the two pipeline x chunk sizes that leave a layer for each chunk and are nearest to `pp` x `vpp`."""
    sizes = [(p, v) for p in range(1, layers + 1) for v in range(1, layers // p + 1)]
    fitting = [(p, v) for p, v in sizes if v == 1 or (p > 1 and vpp > 1)]
    return _nearest_pairs((pp, vpp), fitting)


def _nearest_pairs(current: tuple[int, int], choices: Iterable[tuple[int, int]]) -> str:
    """Return the two choices that change least, such as `2 x 1 or 1 x 2`."""
    nearest = sorted(choices, key=lambda pair: (sum(abs(a - b) for a, b in zip(pair, current, strict=True)), pair))
    return either(f"{first} x {second}" for first, second in nearest[:2])
