"""Process groups: each made once for all that use the same ranks, in few calls whatever the size of the world."""

from __future__ import annotations

import datetime
import os
import resource
import threading
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from megappo.runtime.launchers import Ranks
from megappo.runtime.store import is_loopback

_GLOO_INTERFACE, _LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
_LEAVING = threading.Lock()


@dataclass(frozen=True)
class WantedGroups:
    """Groups of one kind; no rank is in two of them."""

    name: str
    """Said of a group in NCCL's reports, as torch's own name of it says nothing."""
    groups: Sequence[Sequence[int]]
    """Global ranks."""
    apart: str = ""
    """Those with different words here share no group, whatever the ranks."""
    carries_objects: bool = False
    """Whether ranks tell each other Python objects over them."""


class _Members(NamedTuple):
    """What a group is, for all that may share it."""

    apart: str
    ranks: tuple[int, ...]


def collective_backend(device_type: str, *, carries_objects: bool = False) -> str:
    """What carries a group's collectives: of tensors on the device, and of Python objects where it has some.

    Objects travel over gloo also where there are GPUs: a rank that waits inside NCCL keeps its GPU busy with a kernel
    that spins, while a server may still generate there. Groups without them have no gloo, which connects every rank
    to every other when the group is made.
    """
    if device_type == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if carries_objects else "nccl"


def allow_connections() -> None:
    """Raise the limit of open files to what this process may have: a group on gloo has a connection to every rank of
    it, and rank 0's store two from each, at 512 ranks more than the usual soft limit of 1024."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def stay_on_this_machine(environment: MutableMapping[str, str], ranks: Ranks) -> None:
    """Have gloo, which asks nobody for a key, listen on the loopback interface where all ranks are on this machine;
    torch's default is the interface that the machine's name means. An interface that is set already stays."""
    if ranks.world_size in (1, ranks.local_world_size):
        environment.setdefault(_GLOO_INTERFACE, _LOOPBACK)


@contextmanager
def reached_at(address: str) -> Iterator[None]:
    """Groups over gloo that are made inside may have members who know this machine by that address, on others."""
    if os.environ.get(_GLOO_INTERFACE) != _LOOPBACK or is_loopback(address):
        yield
        return
    with _LEAVING:
        os.environ.pop(_GLOO_INTERFACE, None)
        try:
            yield
        finally:
            os.environ[_GLOO_INTERFACE] = _LOOPBACK


def join_world(device_type: str, ranks: Ranks, timeout: datetime.timedelta, store: dist.Store | None = None) -> None:
    """Meet the other ranks at a store, None for the one that the environment names."""
    backend = collective_backend(device_type, carries_objects=True)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)


def make_groups(
    kinds: Sequence[WantedGroups], device_type: str, timeout: datetime.timedelta
) -> list[dist.ProcessGroup | None]:
    """This rank's group of each kind, None where it is in none; a collective of the world.

    A group is made by its members alone. torch names it after its ranks and a count of the groups that the process has
    made, so its members must have made equally many: all ranks go through the same rounds and make one group in each,
    one of this rank alone where no other is due.
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
    """What each rank makes in each round: a group stands in the first in which all its ranks are free. There are at
    most as many rounds as kinds, as the groups of a kind fit into one."""
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
    """`by_members`: the others need not know of it. Without a timeout a group has torch's own, not the world's."""
    group = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=by_members, group_desc=name
    )
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    return group


def make_host_group(name: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """All ranks once more, over gloo, for a thread whose collectives must not meet others'; a collective of the
    world."""
    return _new_group(range(dist.get_world_size()), "gloo", timeout, name, by_members=False)


def leave_at_once(group: dist.ProcessGroup) -> None:
    """Leave a group whose other members may be gone: nothing is waited for, and torch knows of it no more."""
    group.abort()  # what still goes on in it
    dist.destroy_process_group(group)
