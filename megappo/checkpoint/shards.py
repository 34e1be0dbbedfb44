"""A role's weights and optimizer state as shards of whole tensors, named by the Hugging Face tensors they hold.

Names and shapes do not depend on the layout, so another layout finds what it needs. A gated layer's two halves are
tensors of their own, because each tensor rank holds a part of both; query, key and value stay in Megatron's order, in
which the shards of tensor ranks follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner, mcore_to_pyt_state_dict
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from megappo.checkpoint.files import DamagedError
from megappo.checkpoint.reader import ShardReader, read_metadata
from megappo.models.build import RoleModel
from megappo.models.optimizer_state import MOMENTS
from megappo.models.roles import TrainedRole
from megappo.reshard.hf_map import Parameter, model_parameters
from megappo.runtime import Runtime

VALUE_HEAD = ("value_head.weight", "value_head.bias")
_SPLIT_AXIS = {"glu": 0, "qkv": 0, "vocab": 0, "row": 1}


@dataclass(frozen=True)
class _Entry:
    """A parameter of this rank."""

    names: tuple[str, ...]
    """The whole tensors it is a part of: two for a gated layer, else one."""
    parameter: nn.Parameter
    axis: int | None
    """Along which tensor ranks share them; None: every tensor rank holds all."""
    is_padded: bool = False
    """Its rows are padded to a multiple of the tensor parallel size."""
    is_copy: bool = False
    """The same as a parameter of another stage."""
    is_expert: bool = False
    """Whole on every rank that holds it, which are others than those of the rest."""


def _entries(model: RoleModel) -> Iterator[_Entry]:
    for entry, parameter in model.parameters_here():
        yield _Entry(
            _names(entry),
            parameter,
            _SPLIT_AXIS.get(entry.kind),
            is_padded=entry.kind == "vocab",
            is_expert=entry.expert is not None,
        )
    last = model.chunks[-1]
    if not last.post_process:
        return
    if model.is_critic:
        yield _Entry(VALUE_HEAD[:1], last.output_layer.weight, None)
        yield _Entry(VALUE_HEAD[1:], last.output_layer.bias, None)
    elif model.arch.tied_embeddings and not last.pre_process:
        embedding = next(iter(model_parameters(model.arch)))
        yield _Entry(_names(embedding), last.output_layer.weight, 0, is_padded=True, is_copy=True)


def _names(entry: Parameter) -> tuple[str, ...]:
    if entry.kind == "qkv":
        return (entry.hf[0].replace("q_proj", "qkv_proj"),)
    return entry.hf


def stored_names(entry: Parameter) -> Iterator[tuple[str, str]]:
    """(whole tensor of a checkpoint, Hugging Face tensor that it is, or holds) for each of the latter."""
    names = _names(entry)
    yield from zip(names if len(names) == len(entry.hf) else names * len(entry.hf), entry.hf, strict=True)


def role_updates(role: TrainedRole, runtime: Runtime) -> int:
    """Updates the role has applied, on every rank; a collective of the world."""
    first = role.placement.grid.ranks[0]
    shared = [role.optimizer.updates if runtime.rank == first else None]
    dist.broadcast_object_list(shared, src=first)
    updates = shared[0]
    assert updates is not None
    return int(updates)


def role_shards(role: TrainedRole) -> dict[str, ShardedTensor]:
    """What this rank writes of a role: copies on the CPU that later updates do not touch.

    Every shard is written once, by the first replica that holds it; a collective of the role.
    """
    layout, model = role.placement.layout, role.model
    if layout is None or model is None:
        return {}
    shards: dict[str, ShardedTensor] = {}
    for entry in _entries(model):
        tensors = role.optimizer.state.whole(entry.parameter, moments=role.optimizer.updates > 0)
        is_first = layout.replica == 0 and (entry.axis is not None or layout.tensor_rank == 0)
        if entry.is_expert:
            is_first = layout.expert_replica == 0
        if is_first and not entry.is_copy:
            for kind, tensor in tensors.items():
                shards |= _sharded(role, entry, kind, tensor.to("cpu", copy=True))
    return shards


def _sharded(role: TrainedRole, entry: _Entry, kind: str, tensor: Tensor) -> dict[str, ShardedTensor]:
    """Shards of one of a parameter's tensors; they share its memory."""
    layout = role.placement.layout
    assert layout is not None
    place = () if entry.axis is None else ((entry.axis, layout.tensor_rank, layout.grid.tp),)
    return {
        key: ShardedTensor.from_rank_offsets(key, part, *place, allow_shape_mismatch=entry.is_padded)
        for key, part in zip(_keys(role, entry, kind), tensor.chunk(len(entry.names)), strict=True)
    }


def _keys(role: TrainedRole, entry: _Entry, kind: str) -> list[str]:
    return [f"{role.placement.name}.{kind}.{name}" for name in entry.names]


def load_shards(folder: Path, roles: Sequence[TrainedRole], updates: Mapping[str, int], runtime: Runtime) -> None:
    """Put every role of this rank where the checkpoint was; a collective of the world.

    Raises ValueError where the checkpoint does not hold what the roles need.
    """
    wanted: dict[str, ShardedTensor] = {}
    for role in roles:
        for entry in _entries(role.model) if role.model is not None else ():
            for kind in ("weight", *(MOMENTS if updates[role.placement.name] else ())):
                zeros = torch.zeros(entry.parameter.shape, dtype=torch.float32)
                wanted |= _sharded(role, entry, kind, zeros)
    read_tensors(folder, wanted, runtime)
    for role in roles:
        if role.model is not None:
            _restore(role, wanted, updates[role.placement.name])


def read_tensors(folder: Path, wanted: Mapping[str, ShardedTensor], runtime: Runtime) -> None:
    """Fill the tensors of shards from a checkpoint; a collective of the world.

    Raises ValueError on every rank where the checkpoint is not what was written, or does not hold what they ask for.
    """
    reader = _open(folder)
    padded = {key: shard for key, shard in wanted.items() if shard.allow_shape_mismatch}
    planner = MCoreLoadPlanner(
        shapes_validation_sharded_tensors=[shard for key, shard in wanted.items() if key not in padded],
        allow_shape_mismatch_sharded_tensors=padded,
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    try:
        with runtime.megatron():
            state = mcore_to_pyt_state_dict({key: [shard] for key, shard in wanted.items()}, is_loading=True)
            dcp.load(state, storage_reader=reader, planner=planner)
    except CheckpointException as error:  # raised on every rank, whichever of them failed
        first = next(iter(error.failures.values()))[0]
        reason = " ".join(str(first).split())[:300]
        raise ValueError(f"{folder} does not hold what this model and layout need: {reason}") from error


def _open(folder: Path) -> ShardReader:
    """Raises ValueError on every rank where one of them reads metadata that no checkpoint holds."""
    reader, problem = None, None
    try:
        reader = ShardReader(folder, read_metadata(folder))
    except DamagedError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise ValueError(f"{folder} is damaged: {found}")
    assert reader is not None
    return reader


def _restore(role: TrainedRole, loaded: Mapping[str, ShardedTensor], updates: int) -> None:
    assert role.model is not None
    for entry in _entries(role.model):
        tensors = {
            kind: torch.cat([loaded[key].data for key in _keys(role, entry, kind)])
            for kind in ("weight", *(MOMENTS if updates else ()))
        }
        role.optimizer.state.restore(entry.parameter, tensors, updates)
    role.optimizer.continue_after(updates)
