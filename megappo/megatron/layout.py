"""Process groups of one role. Roles live on their own groups, so an actor and a critic of different layouts may share
ranks or stand apart; Megatron's global state is not used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from megappo.config.grid import Grid

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


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
    tp = _own_group(grid.tensor_groups, rank)
    pp = _own_group(grid.pipeline_groups, rank)
    dp = _own_group(grid.data_groups, rank)
    mp = _own_group([grid.replica_ranks(d) for d in range(grid.dp)], rank)
    single = _own_group([[r] for r in grid.ranks], rank)
    tp_dp = _own_group([grid.stage_ranks(p) for p in range(grid.pp)], rank)
    embd = _own_group([sorted({stages[0], stages[-1]}) for stages in grid.pipeline_groups], rank)
    pos_embd = _own_group([stages[:1] for stages in grid.pipeline_groups], rank)
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
    shares, copies = grid.expert_groups, grid.expert_replicas
    ep = _own_group(shares, rank)
    expert_dp = _own_group(
        [list(same) for s in range(grid.pp) for same in zip(*shares[s * copies : (s + 1) * copies], strict=True)], rank
    )
    expert_mp = _own_group([[r for share in shares[copy::copies] for r in share] for copy in range(copies)], rank)
    return ep, expert_dp, expert_mp
