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

    Tensor parallel neighbours are the closest ranks because they talk the most. Experts are spread over the ranks of a
    stage in the order (expert replica, expert rank), expert rank fastest: an expert parallel group lies within a tensor
    parallel group, or spans data replicas where it is larger.
    """

    ranks: tuple[int, ...]
    tp: int
    pp: int
    ep: int = 1

    @property
    def dp(self) -> int:
        """Number of data parallel replicas."""
        return len(self.ranks) // (self.tp * self.pp)

    def rank(self, replica: int, stage: int, tensor_rank: int) -> int:
        """Global rank at a place of the grid."""
        return self.ranks[(replica * self.pp + stage) * self.tp + tensor_rank]

    def stage_ranks(self, stage: int) -> list[int]:
        """All ranks of a pipeline stage, in the order in which experts are spread over them."""
        return [self.rank(d, stage, t) for d in range(self.dp) for t in range(self.tp)]

    def expert_place(self, replica: int, tensor_rank: int) -> tuple[int, int]:
        """(expert replica, expert rank) of a place in its stage."""
        return divmod(replica * self.tp + tensor_rank, self.ep)

    def expert_owner(self, stage: int, expert_rank: int) -> int:
        """Global rank that holds an expert rank's share in the first expert replica."""
        return self.stage_ranks(stage)[expert_rank]

    @property
    def expert_groups(self) -> list[list[int]]:
        """Ranks that hold all experts of their stage together."""
        stages, size = [self.stage_ranks(stage) for stage in range(self.pp)], self.dp * self.tp
        return [stage[first : first + self.ep] for stage in stages for first in range(0, size, self.ep)]

    @property
    def replicas_in_step(self) -> bool:
        """Whether data replicas exchange tokens in every layer, so that all of them run as many microbatches."""
        return self.tp % self.ep != 0

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
    expert_replica: int
    """Number of the copy of the experts that this rank holds a part of."""
    expert_rank: int
    """Which of the `grid.ep` shares of the experts is here."""
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
    ep, expert_dp, expert_mp = _expert_groups(grid, rank)
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
        ep=ep,
        expt_tp=single,
        tp_ep=ep,
        tp_ep_pp=expert_mp,
        dp=dp,
        dp_cp=dp,
        tp_dp_cp=tp_dp,
        expt_dp=expert_dp,
        intra_dp_cp=dp,
        intra_expt_dp=expert_dp,
        inter_dist_opt=None,
        intra_dist_opt=role,
    )
    expert_place = grid.expert_place(place[0], place[2])
    return Layout(grid, vpp, sequence_parallel, *place, *expert_place, groups, role)


def _expert_groups(
    grid: Grid, rank: int
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's expert parallel group, the ranks with the same experts, and all experts of all stages once.

    Groups of their own also where they hold the same ranks as others: Megatron adds up gradient norms of dense and
    expert parameters by comparing groups.
    """
    shares = grid.expert_groups
    copies = len(shares) // grid.pp
    ep = _own_group(shares, rank)
    expert_dp = _own_group(
        [list(same) for s in range(grid.pp) for same in zip(*shares[s * copies : (s + 1) * copies], strict=True)], rank
    )
    expert_mp = _own_group([[r for share in shares[copy::copies] for r in share] for copy in range(copies)], rank)
    return ep, expert_dp, expert_mp
