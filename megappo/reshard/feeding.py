"""Select the ranks that feed the servers of a run, and the weights that each rank sends.

A colocated server uses the devices of as many trainer ranks as the server has ranks. Each of these trainer ranks
sends the weights of the server rank on its device. A disaggregated server is fed by one rank of each pipeline stage
of the actor. Each of these ranks broadcasts the tensors of its stage. Different servers are fed by different ranks of
a stage.
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
    """Whether each rank of a colocated server receives only its slices. Otherwise all ranks receive whole tensors."""
    anywhere: bool = False
    """Whether servers are reachable from every machine. Disaggregated servers of the run are not, because these
    servers run and listen on the first machine."""
    nodes: int = 1
    """Number of machines of each server. The number divides the ranks of a server."""

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks write their parts into memory that servers read."""
        return self.colocated and not self.on_cuda and len(set(self.hosts)) == 1

    def sender(self, index: int) -> int:
        """Return the rank that manages a server: the first rank that starts one of its parts."""
        return self.starters(index)[0]

    def starters(self, index: int) -> tuple[int, ...]:
        """Return the ranks that start a server, one on each machine of the server. Servers of the run that do not use
        the GPUs of the trainers run on the first machines. `sync_address` is an address of the first machine."""
        if self.anywhere:
            return (index % len(self.hosts),)
        if self.on_cuda and self.colocated:
            return tuple(range(index * self.tp, (index + 1) * self.tp, self._node_ranks))
        return tuple(ranks[index % len(ranks)] for ranks in self._machines[: self.nodes])

    def problem(self, index: int) -> str | None:
        """Return the reason why the machines of the trainers cannot run a server on several machines, or None."""
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
            f"the ranks {index * self.tp} to {(index + 1) * self.tp - 1} on its devices are not {self._node_ranks} "
            f"on each of {self.nodes} machines"
        )

    @property
    def _node_ranks(self) -> int:
        return self.tp // self.nodes

    @cached_property
    def _machines(self) -> list[list[int]]:
        """The ranks of each machine."""
        ranks_by_host: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            ranks_by_host.setdefault(host, []).append(rank)
        return list(ranks_by_host.values())

    def feeders(self, index: int, grid: Grid) -> tuple[Receiver, ...]:
        """Return the receivers that feed a server, for an actor on this grid. The order is that of the ranks of the
        server or of the pipeline stages."""
        if not self.colocated:
            return tuple(Receiver(self._of_stage(grid, stage, index), stage=stage) for stage in range(grid.pp))
        if not self.sliced:
            return tuple(map(Receiver, self.starters(index)))
        starters = self.starters(index)
        return tuple(Receiver(self._nearest_rank(starters, r), self.tp, r) for r in range(self.tp))

    def opening(self, index: int, rank: int) -> range:
        """Return the ranks of a server, by number, that this rank starts."""
        starters = self.starters(index)
        first = starters.index(rank) * self._node_ranks if rank in starters else self.tp
        return range(first, min(first + self._node_ranks, self.tp))

    def _nearest_rank(self, starters: Sequence[int], tensor_rank: int) -> int:
        """Return the rank on the device of a server rank. If no trainer uses the device, return the rank that starts
        the part."""
        node, place = divmod(tensor_rank, self._node_ranks)
        rank = starters[node] + place
        near = rank < len(self.hosts) and self.hosts[rank] == self.hosts[starters[node]]
        return rank if near and not self.shares_memory else starters[node]

    def _of_stage(self, grid: Grid, stage: int, index: int) -> int:
        """Return a rank of the stage that can reach the server, or the sender if no rank can."""
        ranks = [rank for rank in grid.stage_ranks(stage) if self.anywhere or self.hosts[rank] == self.hosts[0]]
        return ranks[index % len(ranks)] if ranks else self.sender(index)
