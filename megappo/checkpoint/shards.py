"""Weights and optimizer state of a role as shards of whole tensors, named by their Hugging Face tensors. For a role
with adapters, only the adapters are stored, because only the adapters are trained.

Names and shapes do not depend on the layout, so that all layouts can load a checkpoint. The two halves of a gated layer
are separate tensors, because each tensor rank has a part of both halves. Query, key and value are in Megatron's order,
in which the shards of tensor ranks are contiguous.
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
from megappo.megatron.optimizer.optimizer_state import MOMENTS
from megappo.megatron.packing import balance
from megappo.megatron.roles import LocalRole, Role, TrainedRole
from megappo.runtime.ranks.objects import agreed, broadcast_object

VALUE_HEAD = ("value_head.weight", "value_head.bias")


@dataclass(frozen=True)
class _Entry:
    """A parameter of this rank."""

    local: LocalShard
    is_copy: bool = False
    """Whether the parameter is the last stage's copy of a tied embedding. The first stage writes the embedding."""

    @property
    def of(self) -> Parameter:
        """Entry of the parameter in the map."""
        return self.local.entry

    def kinds(self, updates: int) -> tuple[str, ...]:
        """Return the tensors of the parameter in a checkpoint after a number of updates."""
        return ("weight", *(MOMENTS if updates and self.local.is_trained else ()))


def _entries(model: RoleModel) -> Iterator[_Entry]:
    yield from map(_Entry, model.local_trained())
    last = model.chunks[-1]
    if last.post_process and model.is_critic:
        for name, parameter in zip(VALUE_HEAD, (last.output_layer.weight, last.output_layer.bias), strict=True):
            entry = Parameter(name, (name,), (tuple(parameter.shape),), "replicated")
            yield _Entry(LocalShard(entry, parameter))
    elif model.options.lora is None and last.post_process and model.arch.tied_embeddings and not last.pre_process:
        yield _Entry(LocalShard(embedding(model.arch), last.output_layer.weight), is_copy=True)


def role_updates(role: Role) -> int:
    """Return the number of updates of a trained role on every rank. A collective of all ranks."""
    mine = role.optimizer.updates if isinstance(role, TrainedRole) else 0
    return broadcast_object(mine, src=role.placement.grid.ranks[0])


def schedule_place(role: Role) -> int:
    """Return the position in the schedule of a trained role on every rank. A collective of all ranks."""
    mine = role.optimizer.place if isinstance(role, TrainedRole) else 0
    return broadcast_object(mine, src=role.placement.grid.ranks[0])


def role_shards(role: Role) -> dict[str, ShardedTensor]:
    """Return the shards of a role that this rank writes, as copies on the CPU. Later updates do not change the copies.

    Exactly one rank writes each shard. A collective of the role.
    """
    if not isinstance(role, TrainedRole):
        return {}
    shards: dict[str, ShardedTensor] = {}
    entries = list(_entries(role.model))
    written = _own_entries(role.layout, entries)
    for number, entry in enumerate(entries):
        tensors = role.optimizer.state.whole(entry.local, role.storage.read, moments=role.optimizer.updates > 0)
        for kind, tensor in tensors.items() if number in written else ():
            shards |= _sharded(role, entry, kind, tensor.to("cpu", copy=True))
    return shards


def weight_shards(role: Role, name: str) -> dict[str, ShardedTensor]:
    """Return the weight shards of an untrained role with the prefix `name`. See `role_shards`."""
    if not isinstance(role, LocalRole):
        return {}
    shards: dict[str, ShardedTensor] = {}
    entries = list(_entries(role.model))
    for number in sorted(_own_entries(role.layout, entries)):
        weight = role.read_shard(entries[number].local).float().to("cpu", copy=True)
        shards |= _sharded(role, entries[number], "weight", weight, name)
    return shards


def load_weights(folder: Path, role: Role, name: str) -> None:
    """Load the weights from `weight_shards`. A collective of all ranks. Raises ValueError as `load_shards` does."""
    targets: dict[str, ShardedTensor] = {}
    if isinstance(role, LocalRole):
        for entry in _entries(role.model):
            targets |= _sharded(role, entry, "weight", torch.zeros(entry.local.shape, dtype=torch.float32), name)
    read_tensors(folder, targets)
    if isinstance(role, LocalRole):
        role.wake()
        for entry in _entries(role.model):
            entry.local.shard.copy_(torch.cat([targets[key].data for key in _keys(name, entry, "weight")]))
        role.rest()


def _own_entries(layout: Layout, entries: Sequence[_Entry]) -> set[int]:
    """Return the numbers of the entries that this rank writes. Ranks with the same entries split them by size."""
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
    selected = set[int]()
    for numbers, holders, own in kinds:
        sizes = [math.prod(entries[number].local.shape) for number in numbers]
        selected |= {numbers[i] for i in balance(sizes, holders)[own]}
    return selected


def _sharded(
    role: LocalRole, entry: _Entry, kind: str, tensor: Tensor, name: str | None = None
) -> dict[str, ShardedTensor]:
    """Return shards of a tensor of a parameter, with the prefix `name` or the role's name. The shards share the memory
    of the tensor."""
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
    """Restore the roles of this rank from a checkpoint. A collective of all ranks.

    Args:
        folder: folder of the checkpoint.
        roles: roles to restore.
        updates: number of applied updates by role.
        places: position in the schedule by role. Default: the number of updates.

    Raises ValueError if the checkpoint does not fit the roles.
    """
    targets: dict[str, ShardedTensor] = {}
    trained = [role for role in roles if isinstance(role, TrainedRole)]
    for role in trained:
        for entry in _entries(role.model):
            for kind in entry.kinds(updates[role.placement.name]):
                zeros = torch.zeros(entry.local.shape, dtype=torch.float32)
                targets |= _sharded(role, entry, kind, zeros)
    read_tensors(folder, targets)
    for role in trained:
        name = role.placement.name
        _restore(role, targets, updates[name], places.get(name, updates[name]))


def read_tensors(folder: Path, targets: Mapping[str, ShardedTensor]) -> None:
    """Load tensors from a checkpoint into `targets`. A collective of all ranks.

    Raises ValueError on every rank if the checkpoint is damaged, or does not contain the tensors.
    """
    reader = _open(folder)
    padded = {key: shard for key, shard in targets.items() if shard.allow_shape_mismatch}
    planner = MCoreLoadPlanner(
        shapes_validation_sharded_tensors=[shard for key, shard in targets.items() if key not in padded],
        allow_shape_mismatch_sharded_tensors=padded,
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    try:
        state = mcore_to_pyt_state_dict({key: [shard] for key, shard in targets.items()}, is_loading=True)
        dcp.load(state, storage_reader=reader, planner=planner)
    except CheckpointException as error:  # raised on every rank if one rank failed
        first = next(iter(error.failures.values()))[0]
        raise ValueError(f"{folder} does not contain the tensors of this model and layout: {reason(first)}") from error


def _open(folder: Path) -> ShardReader:
    """Open a checkpoint. Raises ValueError on every rank if a rank reads invalid metadata."""
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
        role.optimizer.state.restore(entry.local, tensors, updates)
    role.optimizer.continue_after(updates, place)
    role.rest()
