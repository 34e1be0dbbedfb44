"""Process groups: each is created once for all users of the same ranks, in few calls whatever the size of the world."""

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
    """Groups of one kind; no rank is in two of them."""

    name: str
    """Description of the groups in NCCL's reports; torch's own names for groups say nothing."""
    groups: Sequence[Sequence[int]]
    """Global ranks."""
    apart: str = ""
    """Groups with different values here are not shared, even with the same ranks."""
    carries_objects: bool = False
    """Whether Python objects are sent over the groups."""


class _Members(NamedTuple):
    """Identity of a group; all kinds with the same one share it."""

    apart: str
    ranks: tuple[int, ...]


def collective_backend(device_type: str, *, carries_objects: bool = False) -> str:
    """torch's backend of a group: for tensors on the device, and for Python objects where it carries some.

    Objects use gloo even where there are GPUs: a rank that waits inside NCCL keeps its GPU busy with a spinning kernel,
    while a server may still generate there. Groups without objects have no gloo, which connects every rank to every
    other when the group is made.
    """
    if device_type == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if carries_objects else "nccl"


def allow_connections() -> None:
    """Raise the limit of open files to this process's hard limit. A group on gloo has a connection to each of its
    ranks, and rank 0's store two from each, which at 512 ranks exceeds the usual soft limit of 1024."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def join_world(device_type: str, ranks: Ranks, timeout: datetime.timedelta, store: dist.Store | None = None) -> None:
    """Meet the other ranks at a store; None: the one that the environment names."""
    backend = collective_backend(device_type, carries_objects=True)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)


def make_groups(
    kinds: Sequence[WantedGroups], device_type: str, timeout: datetime.timedelta
) -> list[dist.ProcessGroup | None]:
    """This rank's group of each kind, None where it is in none; a collective of the world.

    A group is created by its members alone. torch names it after its ranks and the number of groups that the process
    has created, so its members must have created equally many. All ranks therefore go through the same rounds and
    create one group in each: a group of this rank alone where no other is due.
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
    """Groups that each rank creates in each round: a group is put into the first round in which all its ranks are free.
    There are at most as many rounds as kinds, as the groups of a kind fit into one."""
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
    """`by_members`: only the members call this. Without an explicit timeout a group would have torch's default (10
    minutes on NCCL), not the world's."""
    group = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=by_members, group_desc=name
    )
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    return group


def make_host_group(name: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks for a thread, whose collectives must not be mixed with others'; a collective of the
    world."""
    return _new_group(range(dist.get_world_size()), "gloo", timeout, name, by_members=False)


def leave_at_once(group: dist.ProcessGroup) -> None:
    """Leave a group whose other members may be gone: without waiting, and torch forgets the group."""
    group.abort()  # ends its pending collectives
    dist.destroy_process_group(group)
