"""Process groups of one role. Roles live on their own groups, so an actor and a critic of different layouts may share
ranks or stand apart; Megatron's global state is not used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class Grid:
    """Ranks of a role ordered as (data replica, pipeline stage, tensor rank), tensor rank fastest.

    Tensor parallel neighbours are the closest ranks because they talk the most.
    """

    ranks: tuple[int, ...]
    tp: int
    pp: int

    @property
    def dp(self) -> int:
        """Number of data parallel replicas."""
        return len(self.ranks) // (self.tp * self.pp)

    def rank(self, replica: int, stage: int, tensor_rank: int) -> int:
        """Global rank at a place of the grid."""
        return self.ranks[(replica * self.pp + stage) * self.tp + tensor_rank]

    def replica_ranks(self, replica: int) -> tuple[int, ...]:
        """All ranks that hold one copy of the model."""
        size = self.pp * self.tp
        return self.ranks[replica * size : (replica + 1) * size]

    def output_rank(self, replica: int) -> int:
        """The rank that hands out a replica's results: last stage, first tensor rank."""
        return self.rank(replica, self.pp - 1, 0)

    def place(self, rank: int) -> tuple[int, int, int] | None:
        """(replica, stage, tensor rank) of a global rank, None outside the role."""
        if rank not in self.ranks:
            return None
        index = self.ranks.index(rank)
        return index // (self.pp * self.tp), index // self.tp % self.pp, index % self.tp


@dataclass(frozen=True)
class Layout:
    """A grid, this rank's place in it and the groups it needs. Made by `make_layout` on every rank of the world."""

    grid: Grid
    vpp: int
    sequence_parallel: bool
    replica: int
    stage: int
    tensor_rank: int
    groups: ProcessGroupCollection
    role_group: dist.ProcessGroup
    """All ranks of the role."""

    @property
    def is_last_stage(self) -> bool:
        """Whether the output layer lives here."""
        return self.stage == self.grid.pp - 1

    @property
    def hands_out_results(self) -> bool:
        """Whether this rank is its replica's output rank."""
        return self.is_last_stage and self.tensor_rank == 0


def _own_group(families: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """Make every group of a family (all ranks of the world must take part); return the one that holds `rank`.

    None outside all of them: Megatron's finalize_model_grads stumbles over the integer new_group returns there.
    """
    own: dist.ProcessGroup | None = None
    for members in families:
        group = dist.new_group(list(members))
        if rank in members:
            assert isinstance(group, dist.ProcessGroup)
            own = group
    return own


def make_layout(grid: Grid, *, vpp: int = 1, sequence_parallel: bool = False) -> Layout | None:
    """Make the process groups of a role; a collective of the whole world.

    Returns None on ranks outside the role.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    rank = dist.get_rank()
    dp_range, pp_range, tp_range = range(grid.dp), range(grid.pp), range(grid.tp)
    tp = _own_group([[grid.rank(d, p, t) for t in tp_range] for d in dp_range for p in pp_range], rank)
    pp = _own_group([[grid.rank(d, p, t) for p in pp_range] for d in dp_range for t in tp_range], rank)
    dp = _own_group([[grid.rank(d, p, t) for d in dp_range] for p in pp_range for t in tp_range], rank)
    mp = _own_group([grid.replica_ranks(d) for d in dp_range], rank)
    single = _own_group([[r] for r in grid.ranks], rank)
    tp_dp = _own_group([[grid.rank(d, p, t) for d in dp_range for t in tp_range] for p in pp_range], rank)
    ends = sorted({0, grid.pp - 1})
    embd = _own_group([[grid.rank(d, p, t) for p in ends] for d in dp_range for t in tp_range], rank)
    pos_embd = _own_group([[grid.rank(d, 0, t)] for d in dp_range for t in tp_range], rank)
    role = _own_group([grid.ranks], rank)
    place = grid.place(rank)
    if place is None or role is None:
        return None
    groups = ProcessGroupCollection(
        tp=tp,
        pp=pp,
        mp=mp,
        embd=embd,
        pos_embd=pos_embd,
        cp=single,
        tp_cp=tp,
        ep=single,
        expt_tp=tp,
        tp_ep=tp,
        tp_ep_pp=mp,
        dp=dp,
        dp_cp=dp,
        tp_dp_cp=tp_dp,
        expt_dp=dp,
        intra_dp_cp=dp,
        intra_expt_dp=dp,
        inter_dist_opt=None,
        intra_dist_opt=role,
    )
    return Layout(grid, vpp, sequence_parallel, *place, groups, role)
