"""Chooses the ranks that feed a run's servers with weights, and what each of them gives.

A colocated server stands on the devices of as many trainer ranks as it has ranks, and each of these gives the server's
rank on its device what that rank holds. A disaggregated one is fed by a rank of every pipeline stage of the actor, each
of which broadcasts the tensors of its stage; different servers are fed by different ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megappo.config.grid import Grid
from megappo.reshard.slices import Receiver


@dataclass(frozen=True)
class Feeding:
    """Placement of servers relative to the ranks of the world."""

    hosts: Sequence[Hashable]
    """The machine of each rank."""
    tp: int
    """Ranks of each server."""
    colocated: bool
    on_cuda: bool
    sliced: bool = False
    """Whether each rank of a colocated server is given its own slices; otherwise all of them get whole tensors."""
    anywhere: bool = False
    """Whether servers are reached from every machine. Own disaggregated servers are not: they stand on the first
    machine and listen there."""
    nodes: int = 1
    """Number of machines of each server, which divide its ranks."""

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks write their parts into memory that servers read."""
        return self.colocated and not self.on_cuda and len(set(self.hosts)) == 1

    def sender(self, index: int) -> int:
        """The rank that looks after a server: the first of those that start its parts."""
        return self.starters(index)[0]

    def starters(self, index: int) -> tuple[int, ...]:
        """The ranks that start a server, one on each of its machines. Own servers that are not spread over the
        trainers' GPUs stand on the first machines, and on the very first is `sync_address` of the servers' settings."""
        if self.anywhere:
            return (index % len(self.hosts),)
        if self.on_cuda and self.colocated:
            return tuple(range(index * self.tp, (index + 1) * self.tp, self._node_ranks))
        return tuple(ranks[index % len(ranks)] for ranks in self._machines[: self.nodes])

    def problem(self, index: int) -> str | None:
        """Why the trainers' machines cannot hold a server of several machines; None where they can."""
        if self.nodes == 1 or self.anywhere:
            return None
        if not (self.on_cuda and self.colocated):
            count = len(self._machines)
            return f"the trainers have {count} machine{'' if count == 1 else 's'}" if count < self.nodes else None
        parts = [self.hosts[first : first + self._node_ranks] for first in self.starters(index)]
        whole = all(len(part) == self._node_ranks and len(set(part)) == 1 for part in parts)
        if whole and len({part[0] for part in parts}) == self.nodes:
            return None
        return (
            f"the ranks {index * self.tp} to {(index + 1) * self.tp - 1} beside it are not {self._node_ranks} on each "
            f"of {self.nodes} machines"
        )

    @property
    def _node_ranks(self) -> int:
        return self.tp // self.nodes

    @cached_property
    def _machines(self) -> list[list[int]]:
        """The ranks of each machine."""
        found: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return list(found.values())

    def feeders(self, index: int, grid: Grid) -> tuple[Receiver, ...]:
        """The receivers that feed a server, for an actor on this grid, in the order of the server's ranks or of
        pipeline stages."""
        if not self.colocated:
            return tuple(Receiver(self._of_stage(grid, stage, index), stage=stage) for stage in range(grid.pp))
        if not self.sliced:
            return tuple(map(Receiver, self.starters(index)))
        starters = self.starters(index)
        return tuple(Receiver(self._beside(starters, r), self.tp, r) for r in range(self.tp))

    def opening(self, index: int, rank: int) -> range:
        """The ranks of a server, by their numbers, that this rank starts."""
        starters = self.starters(index)
        first = starters.index(rank) * self._node_ranks if rank in starters else self.tp
        return range(first, min(first + self._node_ranks, self.tp))

    def _beside(self, starters: Sequence[int], tensor_rank: int) -> int:
        """The rank on whose device a server's rank stands; where nobody trains there, the rank that starts it."""
        node, place = divmod(tensor_rank, self._node_ranks)
        rank = starters[node] + place
        near = rank < len(self.hosts) and self.hosts[rank] == self.hosts[starters[node]]
        return rank if near and not self.shares_memory else starters[node]

    def _of_stage(self, grid: Grid, stage: int, index: int) -> int:
        """A rank of the stage that can reach the server; where none can, the sender."""
        ranks = [rank for rank in grid.stage_ranks(stage) if self.anywhere or self.hosts[rank] == self.hosts[0]]
        return ranks[index % len(ranks)] if ranks else self.sender(index)
