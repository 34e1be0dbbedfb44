"""A role's weights and optimizer state as shards of whole tensors, named by the Hugging Face tensors that they hold.
For a role with adapters only these are stored, as only they are trained.

Names and shapes do not depend on the layout, so that another layout finds what it needs. A gated layer's two halves are
separate tensors, because each tensor rank holds a part of both. Query, key and value stay in Megatron's order, in which
the shards of tensor ranks follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner, mcore_to_pyt_state_dict
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megappo.checkpoint.files import DamagedError
from megappo.checkpoint.reader import ShardReader, read_metadata
from megappo.errors import reason
from megappo.families.parameters import Parameter, embedding
from megappo.megatron.build import RoleModel
from megappo.megatron.layout import Layout
from megappo.megatron.local_shards import LocalShard
from megappo.megatron.optimizer_state import MOMENTS
from megappo.megatron.packing import balance
from megappo.megatron.roles import LocalRole, Role, TrainedRole
from megappo.runtime.objects import agreed, broadcast_object

VALUE_HEAD = ("value_head.weight", "value_head.bias")


@dataclass(frozen=True)
class _Entry:
    """A parameter that this rank holds."""

    held: LocalShard
    is_copy: bool = False
    """Whether it is the last stage's copy of a tied embedding, which the first stage writes."""

    @property
    def of(self) -> Parameter:
        """The parameter's entry in the map."""
        return self.held.entry

    def kinds(self, updates: int) -> tuple[str, ...]:
        """Tensors that a checkpoint holds of the parameter after so many updates."""
        return ("weight", *(MOMENTS if updates and self.held.is_trained else ()))


def _entries(model: RoleModel) -> Iterator[_Entry]:
    yield from map(_Entry, model.trained_here())
    last = model.chunks[-1]
    if last.post_process and model.is_critic:
        for name, parameter in zip(VALUE_HEAD, (last.output_layer.weight, last.output_layer.bias), strict=True):
            entry = Parameter(name, (name,), (tuple(parameter.shape),), "replicated")
            yield _Entry(LocalShard(entry, parameter))
    elif model.options.lora is None and last.post_process and model.arch.tied_embeddings and not last.pre_process:
        yield _Entry(LocalShard(embedding(model.arch), last.output_layer.weight), is_copy=True)


def role_updates(role: Role) -> int:
    """Updates a trained role has applied, on every rank; a collective of the world."""
    mine = role.optimizer.updates if isinstance(role, TrainedRole) else 0
    return broadcast_object(mine, src=role.placement.grid.ranks[0])


def schedule_place(role: Role) -> int:
    """Where a trained role's schedule stands, on every rank; a collective of the world."""
    mine = role.optimizer.place if isinstance(role, TrainedRole) else 0
    return broadcast_object(mine, src=role.placement.grid.ranks[0])


def role_shards(role: Role) -> dict[str, ShardedTensor]:
    """The shards that this rank writes of a role: copies on the CPU that later updates do not touch.

    Every shard is written once; a collective of the role.
    """
    if not isinstance(role, TrainedRole):
        return {}
    shards: dict[str, ShardedTensor] = {}
    entries = list(_entries(role.model))
    written = _written_here(role.layout, entries)
    for number, entry in enumerate(entries):
        tensors = role.optimizer.state.whole(entry.held, role.storage.read, moments=role.optimizer.updates > 0)
        for kind, tensor in tensors.items() if number in written else ():
            shards |= _sharded(role, entry, kind, tensor.to("cpu", copy=True))
    return shards


def weight_shards(role: Role, name: str) -> dict[str, ShardedTensor]:
    """The weight shards of a role that is not trained, under `name`; otherwise as `role_shards`."""
    if not isinstance(role, LocalRole):
        return {}
    shards: dict[str, ShardedTensor] = {}
    entries = list(_entries(role.model))
    for number in sorted(_written_here(role.layout, entries)):
        weight = role.read_shard(entries[number].held).float().to("cpu", copy=True)
        shards |= _sharded(role, entries[number], "weight", weight, name)
    return shards


def load_weights(folder: Path, role: Role, name: str) -> None:
    """Load a role's weights that `weight_shards` gave; a collective of the world. Raises as `load_shards`."""
    wanted: dict[str, ShardedTensor] = {}
    if isinstance(role, LocalRole):
        for entry in _entries(role.model):
            wanted |= _sharded(role, entry, "weight", torch.zeros(entry.held.shape, dtype=torch.float32), name)
    read_tensors(folder, wanted)
    if isinstance(role, LocalRole):
        role.wake()
        for entry in _entries(role.model):
            entry.held.shard.copy_(torch.cat([wanted[key].data for key in _keys(name, entry, "weight")]))
        role.rest()


def _written_here(layout: Layout, entries: Sequence[_Entry]) -> set[int]:
    """Numbers of the entries that this rank writes: ranks that hold the same entries divide them by their sizes."""
    grid, copy = layout.grid, layout.replica * layout.grid.cp + layout.context_rank
    cut, whole, experts = list[int](), list[int](), list[int]()
    for number, entry in enumerate(entries):
        if entry.of.expert is not None:
            experts.append(number)
        elif not entry.is_copy:
            (whole if entry.of.axis is None else cut).append(number)
    kinds = (
        (cut, grid.copies, copy),
        (whole, grid.copies * grid.tp, copy * grid.tp + layout.tensor_rank),
        (experts, grid.expert_replicas, layout.expert_replica),
    )
    found = set[int]()
    for numbers, holders, own in kinds:
        sizes = [math.prod(entries[number].held.shape) for number in numbers]
        found |= {numbers[i] for i in balance(sizes, holders)[own]}
    return found


def _sharded(
    role: LocalRole, entry: _Entry, kind: str, tensor: Tensor, name: str | None = None
) -> dict[str, ShardedTensor]:
    """Shards of one of a parameter's tensors, under the role's name or `name`; they share its memory."""
    layout = role.layout
    place = () if entry.of.axis is None else ((entry.of.axis, layout.tensor_rank, layout.grid.tp),)
    rows = [sum(entry.of.tensors[name][0] for name in names) for names in entry.of.stored.values()]
    parts = tensor.split([len(tensor) * part // sum(rows) for part in rows])
    return {
        key: ShardedTensor.from_rank_offsets(key, part, *place, allow_shape_mismatch=entry.of.kind == "vocab")
        for key, part in zip(_keys(name or role.placement.name, entry, kind), parts, strict=True)
    }


def _keys(role: str, entry: _Entry, kind: str) -> list[str]:
    return [f"{role}.{kind}.{name}" for name in entry.of.stored]


def load_shards(
    folder: Path, roles: Sequence[Role], updates: Mapping[str, int], places: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Restore every role of this rank from a checkpoint; a collective of the world. `updates`: how many each had
    applied; `places`: where their schedules go on, where that is another number.

    Raises ValueError where the checkpoint does not hold what the roles need.
    """
    wanted: dict[str, ShardedTensor] = {}
    here = [role for role in roles if isinstance(role, TrainedRole)]
    for role in here:
        for entry in _entries(role.model):
            for kind in entry.kinds(updates[role.placement.name]):
                zeros = torch.zeros(entry.held.shape, dtype=torch.float32)
                wanted |= _sharded(role, entry, kind, zeros)
    read_tensors(folder, wanted)
    for role in here:
        name = role.placement.name
        _restore(role, wanted, updates[name], places.get(name, updates[name]))


def read_tensors(folder: Path, wanted: Mapping[str, ShardedTensor]) -> None:
    """Load the tensors of `wanted` from a checkpoint; a collective of the world.

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
        state = mcore_to_pyt_state_dict({key: [shard] for key, shard in wanted.items()}, is_loading=True)
        dcp.load(state, storage_reader=reader, planner=planner)
    except CheckpointException as error:  # raised on every rank, whichever of them failed
        first = next(iter(error.failures.values()))[0]
        raise ValueError(f"{folder} does not hold what this model and layout need: {reason(first)}") from error


def _open(folder: Path) -> ShardReader:
    """Open a checkpoint. Raises ValueError on every rank where one of them reads metadata that no checkpoint holds."""
    try:
        return agreed(lambda: ShardReader(folder, read_metadata(folder)), (DamagedError,))
    except ValueError as error:
        raise ValueError(f"{folder} is damaged: {error}") from error


def _restore(role: TrainedRole, loaded: Mapping[str, ShardedTensor], updates: int, place: int) -> None:
    role.wake()
    for entry in _entries(role.model):
        tensors = {
            kind: torch.cat([loaded[key].data for key in _keys(role.placement.name, entry, kind)])
            for kind in entry.kinds(updates)
        }
        role.optimizer.state.restore(entry.held, tensors, updates)
    role.optimizer.continue_after(updates, place)
    role.rest()
