"""Process groups. Kinds with the same ranks share one group, and the number of calls does not grow with the world."""

from __future__ import annotations

import datetime
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from megappo.runtime.launchers import Ranks


@dataclass(frozen=True)
class WantedGroups:
    """Groups of one kind. A rank belongs to at most one group of each kind."""

    name: str
    """Description of the groups in reports of NCCL, because torch's own group names are numbers or hashes."""
    groups: Sequence[Sequence[int]]
    """Global ranks of each group."""
    apart: str = ""
    """Sharing key: groups with different values are not shared, even with the same ranks."""
    carries_objects: bool = False
    """Whether the groups transfer Python objects."""


class _Members(NamedTuple):
    """Identity of a group. All kinds with the same identity share the group."""

    apart: str
    ranks: tuple[int, ...]


def collective_backend(device_type: str, *, carries_objects: bool = False) -> str:
    """Return torch's backend of a group for tensors on the device, and for Python objects if the group carries objects.

    Objects use gloo even on GPUs. A rank that waits inside NCCL occupies its GPU with a spinning kernel, while a server
    may still generate on this GPU. Groups without objects do not use gloo, because gloo connects each rank to all
    others when the group is created.
    """
    if device_type == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if carries_objects else "nccl"


def allow_connections() -> None:
    """Raise the soft limit of open files to the hard limit of this process.

    A gloo group has one connection to each of its ranks, and the store of rank 0 has two connections from each rank.
    The number of connections of 512 ranks is greater than the usual soft limit of 1024.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def join_world(device_type: str, ranks: Ranks, timeout: datetime.timedelta, store: dist.Store | None = None) -> None:
    """Join the process group of all ranks. `store`: by default, torch opens the store that the environment names."""
    backend = collective_backend(device_type, carries_objects=True)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)


def make_groups(
    kinds: Sequence[WantedGroups], device_type: str, timeout: datetime.timedelta
) -> list[dist.ProcessGroup | None]:
    """Return the group of this rank for each kind, or None if this rank is in no group of the kind. A collective of the
    world.

    Only the members call torch's function for a group. torch derives the name of a group from its ranks and from the
    number of groups that the process has created. All members must therefore have created the same number of groups.
    For this reason all ranks create one group per round. A rank without a group in a round creates a group of itself.
    """
    due: dict[_Members, WantedGroups] = {}
    for kind in kinds:
        for ranks in kind.groups:
            members = _members(kind, ranks)
            if members not in due or kind.carries_objects:
                due[members] = kind
    rank, everyone = dist.get_rank(), _Members("", tuple(range(dist.get_world_size())))
    assert dist.group.WORLD is not None
    made = {everyone: dist.group.WORLD}
    due.pop(everyone, None)
    for of_round in _rounds(due):
        if rank not in of_round:
            _new_group((rank,), collective_backend(device_type), timeout, "filler")
            continue
        members = of_round[rank]
        backend = collective_backend(device_type, carries_objects=due[members].carries_objects)
        made[members] = _new_group(members.ranks, backend, timeout, due[members].name)
    own = [next((_members(kind, ranks) for ranks in kind.groups if rank in ranks), None) for kind in kinds]
    return [None if members is None else made[members] for members in own]


def _members(kind: WantedGroups, ranks: Sequence[int]) -> _Members:
    return _Members(kind.apart, tuple(sorted(ranks)))


def _rounds(due: Iterable[_Members]) -> list[dict[int, _Members]]:
    """Return the groups of each round by rank. A group is in the first round in which all its ranks are free.

    There are at most as many rounds as kinds, because all groups of a kind fit into one round.
    """
    rounds: list[dict[int, _Members]] = []
    for members in due:
        free = next((of_round for of_round in rounds if of_round.keys().isdisjoint(members.ranks)), None)
        if free is None:
            rounds.append(free := {})
        free.update(dict.fromkeys(members.ranks, members))
    return rounds


def _new_group(
    ranks: Sequence[int], backend: str, timeout: datetime.timedelta, name: str, *, by_members: bool = True
) -> dist.ProcessGroup:
    """Create a group. `by_members`: only the members call this function.

    Without an explicit timeout, torch uses its default (10 minutes on NCCL) instead of the timeout of the world.
    """
    group = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=by_members, group_desc=name
    )
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    return group


def make_host_group(name: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Return a new gloo group of all ranks, for collectives of a separate thread. A collective of the world."""
    return _new_group(range(dist.get_world_size()), "gloo", timeout, name, by_members=False)


def leave_at_once(group: dist.ProcessGroup) -> None:
    """Abort and destroy a group without waiting for its other members, which may be gone."""
    group.abort()  # ends its pending collectives
    dist.destroy_process_group(group)
