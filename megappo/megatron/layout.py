"""Process groups of the roles. Each role has separate groups, so an actor and a critic with different layouts may
share ranks or use different ranks. The global parallel state of Megatron is not used. Groups with the same ranks are
created once and shared."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from megappo.config.grid import Grid
from megappo.megatron.context import ContextShard
from megappo.runtime.ranks.groups import WantedGroups, make_groups

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class Cut:
    """Split of a role's model over ranks, which is the input of `make_layouts`."""

    grid: Grid
    vpp: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Layout:
    """Grid of a role, with this rank's place and process groups. `make_layouts` creates the layout on every rank."""

    grid: Grid
    vpp: int
    sequence_parallel: bool
    replica: int
    stage: int
    context_rank: int
    tensor_rank: int
    expert_replica: int
    """Index of this rank's replica of the experts."""
    expert_rank: int
    """Index of this rank's share of the experts, below `grid.ep`."""
    groups: ProcessGroupCollection
    role_group: dist.ProcessGroup
    """Process group of all ranks of the role."""

    @property
    def is_last_stage(self) -> bool:
        """Whether the output layer is on this rank."""
        return self.stage == self.grid.pp - 1

    @property
    def shard(self) -> ContextShard:
        """Part of each pack on this rank."""
        return ContextShard(self.grid.cp, self.context_rank)

    @property
    def token_multiple(self) -> int:
        """Divisor of the number of this rank's tokens. Sequence parallelism needs the same number of tokens on each
        tensor rank."""
        return self.grid.tp if self.sequence_parallel else 1

    @property
    def sample_group(self) -> dist.ProcessGroup | None:
        """Group of ranks that split the tokens of each sample, or None if this rank has all tokens."""
        shared = self.grid.cp > 1 or self.sequence_parallel
        return self.groups.tp_cp if shared else None

    @property
    def reports_losses(self) -> bool:
        """Whether this rank reports the losses of its context rank's rows (tensor rank 0 of the last stage)."""
        return self.is_last_stage and self.tensor_rank == 0

    @property
    def hands_out_results(self) -> bool:
        """Whether this rank returns the results of its replica."""
        return self.reports_losses and self.context_rank == 0


@dataclass(frozen=True)
class Outside:
    """Placeholder for a layout on a rank that is not in the role."""


def make_layouts(cuts: Mapping[str, Cut], device_type: str, timeout_seconds: float) -> dict[str, Layout | Outside]:
    """Create the process groups of all roles. All ranks must call this function. Return the layout of each role, or
    `Outside` on ranks that are not in the role."""
    _create_gather_buffer()
    kinds_of_roles = {role: _group_kinds(role, cut.grid) for role, cut in cuts.items()}
    kinds = [kind for of_role in kinds_of_roles.values() for kind in of_role.values()]
    own = iter(make_groups(kinds, device_type, datetime.timedelta(seconds=timeout_seconds)))
    groups = {role: {name: next(own) for name in of_role} for role, of_role in kinds_of_roles.items()}
    return {role: _layout(cut, groups[role]) for role, cut in cuts.items()}


def _create_gather_buffer() -> None:
    """Create the buffer of sequence parallel gathers, the only global of Megatron that process groups do not replace.

    0.16.1 / 0.19.2 use the buffer in dot_product_attention.py:189 and tensor_parallel/layers.py:482, 519 / 570, 614.
    """
    from megatron.core import parallel_state

    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def _group_kinds(role: str, grid: Grid) -> dict[str, WantedGroups]:
    """Return every kind of group of a role, by its name in Megatron.

    Groups of experts are separate from other groups with the same ranks, because Megatron compares groups to
    distinguish the gradient norms of dense and expert parameters.
    """
    shares, copies, stages = grid.expert_groups, grid.expert_replicas, grid.pipeline_groups
    dense: dict[str, Sequence[Sequence[int]]] = {
        "tp": grid.tensor_groups,
        "pp": stages,
        "dp_cp": grid.data_groups,
        "mp": grid.model_groups,
        "cp": grid.context_groups,
        "tp_cp": grid.tensor_context_groups,
        "alone": [[rank] for rank in grid.ranks],
        "tp_dp_cp": [grid.stage_ranks(p) for p in range(grid.pp)],
        "embd": [sorted({ranks[0], ranks[-1]}) for ranks in stages],
        "pos_embd": [ranks[:1] for ranks in stages],
    }
    same = [zip(*shares[s * copies : (s + 1) * copies], strict=True) for s in range(grid.pp)]
    experts = {
        "ep": shares,
        "expt_dp": [list(ranks) for of_stage in same for ranks in of_stage],
        "tp_ep_pp": [[r for share in shares[copy::copies] for r in share] for copy in range(copies)],
    }
    return {
        **{name: WantedGroups(f"{role} {name}", groups) for name, groups in dense.items()},
        **{name: WantedGroups(f"{role} {name}", groups, apart="experts") for name, groups in experts.items()},
        "role": WantedGroups(role, [grid.ranks], carries_objects=True),
    }


def _layout(cut: Cut, own: Mapping[str, dist.ProcessGroup | None]) -> Layout | Outside:
    from megatron.core.process_groups_config import ProcessGroupCollection

    place, role = cut.grid.place(dist.get_rank()), own["role"]
    if place is None or role is None:
        return Outside()
    groups = ProcessGroupCollection(
        tp=own["tp"],
        pp=own["pp"],
        mp=own["mp"],
        # None on ranks outside of the group. The placeholder of torch, an int, crashes Megatron
        # (finalize_model_grads.py:229).
        embd=own["embd"],
        pos_embd=own["pos_embd"],
        cp=own["cp"],
        tp_cp=own["tp_cp"],
        ep=own["ep"],
        expt_tp=own["alone"],
        tp_ep=own["ep"],
        tp_ep_pp=own["tp_ep_pp"],
        dp=own["dp_cp"],  # Megatron reads only the size, for buckets
        dp_cp=own["dp_cp"],
        tp_dp_cp=own["tp_dp_cp"],
        expt_dp=own["expt_dp"],
        intra_dp_cp=own["dp_cp"],
        intra_expt_dp=own["expt_dp"],
        inter_dist_opt=None,
        intra_dist_opt=role,
    )
    expert_place = cut.grid.expert_place(place[0], *place[2:])
    return Layout(cut.grid, cut.vpp, cut.sequence_parallel, *place, *expert_place, groups, role)
