"""Which ranks feed the servers of a run, and what each of them gives.

A colocated server stands on the devices of as many trainer ranks as it has ranks, and each of these hands over what the
rank of the server beside it holds. A disaggregated one is fed by a rank of every pipeline stage of the actor, each of
which broadcasts the tensors of its stage; different servers are fed by different ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.config.grid import Grid
from megappo.reshard.slices import Receiver


@dataclass(frozen=True)
class Feeding:
    """Where servers are, seen from the ranks of the world."""

    hosts: Sequence[object]
    """The machine of each rank."""
    tp: int
    """Ranks of each server."""
    colocated: bool
    on_cuda: bool
    sliced: bool = False
    """Each rank of a colocated server is given its own slices; otherwise all of them are given whole tensors."""
    anywhere: bool = False
    """Servers are reached from every machine. Own ones are disaggregated on the first machine, and listen there."""

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks write what they hold into memory that servers read."""
        return self.colocated and not self.on_cuda and len(set(self.hosts)) == 1

    def sender(self, index: int) -> int:
        """The rank that looks after a server. Own servers that are not spread over the trainers' GPUs stand on the
        first machine, and so does `rollout.sglang.sync_address`."""
        if self.anywhere:
            return index % len(self.hosts)
        if self.on_cuda and self.colocated:
            return index * self.tp
        return index % self._on_first

    @property
    def _on_first(self) -> int:
        return sum(host == self.hosts[0] for host in self.hosts)

    def feeders(self, index: int, grid: Grid) -> tuple[Receiver, ...]:
        """Who gives a server the weights of an actor on this grid, and needs them for that, in the order of the
        server's ranks or of pipeline stages."""
        sender = self.sender(index)
        if not self.colocated:
            return tuple(Receiver(self._of_stage(grid, stage, index), stage=stage) for stage in range(grid.pp))
        if not self.sliced:
            return (Receiver(sender),)
        return tuple(Receiver(self._beside(sender, r), self.tp, r) for r in range(self.tp))

    def _beside(self, sender: int, tensor_rank: int) -> int:
        """The rank on whose device a rank of a server stands; the sender where nobody trains there."""
        rank = sender + tensor_rank
        near = rank < len(self.hosts) and self.hosts[rank] == self.hosts[sender]
        return rank if near and not self.shares_memory else sender

    def _of_stage(self, grid: Grid, stage: int, index: int) -> int:
        """A rank of the stage that reaches the server, or, where none does, the sender."""
        ranks = [rank for rank in grid.stage_ranks(stage) if self.anywhere or self.hosts[rank] == self.hosts[0]]
        return ranks[index % len(ranks)] if ranks else self.sender(index)
