"""Order of the ranks of a role, and the ranks of each part of its model. No other module depends on this order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def padded_tokens(tokens: int, cp: int) -> int:
    """Return the number of tokens of a sample after padding to a multiple of 2 CP. Each context rank computes two equal
    chunks."""
    return -(-tokens // (2 * cp)) * 2 * cp if cp > 1 else tokens


@dataclass(frozen=True)
class Grid:
    """Ranks of a role ordered as (data replica, pipeline stage, context rank, tensor rank). The tensor rank is fastest.

    Ranks of a tensor parallel group are adjacent, because they communicate most. Context parallel ranks are next.

    Experts are distributed over the ranks of a stage in the order (expert replica, expert rank). The expert rank is
    fastest. An expert parallel group is part of a tensor parallel group. A larger group spans context ranks and then
    data replicas.
    """

    ranks: Sequence[int]
    """Global ranks in ascending order. Large worlds use a range."""
    tp: int
    pp: int
    ep: int = 1
    cp: int = 1

    @property
    def model_ranks(self) -> int:
        """Number of ranks of a replica, which process a microbatch together."""
        return self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """Number of replicas: ranks / (TP x CP x PP)."""
        return len(self.ranks) // self.model_ranks

    @property
    def copies(self) -> int:
        """Number of copies of the weights except experts: one per context rank of each replica."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Number of copies of a stage's experts."""
        return self.copies * self.tp // self.ep

    def padded(self, tokens: int) -> int:
        """Return the number of tokens of a sample after padding."""
        return padded_tokens(tokens, self.cp)

    def rank(self, replica: int, stage: int, tensor_rank: int, context_rank: int = 0) -> int:
        """Return the global rank at a position of the grid."""
        return self.ranks[((replica * self.pp + stage) * self.cp + context_rank) * self.tp + tensor_rank]

    def stage_ranks(self, stage: int) -> list[int]:
        """Return all ranks of a pipeline stage in the order in which experts are distributed."""
        return [rank for d in range(self.dp) for rank in self.stage_of_replica(d, stage)]

    def expert_place(self, replica: int, context_rank: int, tensor_rank: int) -> tuple[int, int]:
        """Return (expert replica, expert rank) of a position in its stage."""
        return divmod((replica * self.cp + context_rank) * self.tp + tensor_rank, self.ep)

    def expert_owner(self, stage: int, expert_rank: int, expert_replica: int = 0) -> int:
        """Return the global rank with the experts of `expert_rank` in an expert replica."""
        copy, tensor_rank = divmod(expert_replica * self.ep + expert_rank, self.tp)
        return self.rank(copy // self.cp, stage, tensor_rank, copy % self.cp)

    @property
    def tensor_groups(self) -> list[list[int]]:
        """Groups of ranks that share each layer of a stage."""
        starts = range(0, self.cp * self.tp, self.tp)
        return [ranks[first : first + self.tp] for ranks in self.tensor_context_groups for first in starts]

    @property
    def context_groups(self) -> list[list[int]]:
        """Groups of ranks that share the tokens of each sample."""
        return [ranks[t :: self.tp] for ranks in self.tensor_context_groups for t in range(self.tp)]

    @property
    def tensor_context_groups(self) -> list[list[int]]:
        """Groups of ranks of a stage that process a microbatch together."""
        return [self.stage_of_replica(d, p) for d in range(self.dp) for p in range(self.pp)]

    @property
    def pipeline_groups(self) -> list[list[int]]:
        """Groups of ranks that send microbatches from stage to stage."""
        places = itertools.product(range(self.dp), range(self.cp), range(self.tp))
        return [[self.rank(d, p, t, c) for p in range(self.pp)] for d, c, t in places]

    @property
    def model_groups(self) -> list[list[int]]:
        """Groups of ranks that hold one copy of the weights except experts."""
        shared = range(0, len(self.ranks) // self.pp, self.tp)
        stages = [self.stage_ranks(p) for p in range(self.pp)]
        return [[rank for ranks in stages for rank in ranks[first : first + self.tp]] for first in shared]

    @property
    def data_groups(self) -> list[list[int]]:
        """Groups of ranks with the same weights except experts: one rank of each copy."""
        return [self.stage_ranks(p)[t :: self.tp] for p in range(self.pp) for t in range(self.tp)]

    @property
    def expert_groups(self) -> list[list[int]]:
        """Groups of ranks that together hold all experts of their stage."""
        stages, size = [self.stage_ranks(stage) for stage in range(self.pp)], self.copies * self.tp
        return [stage[first : first + self.ep] for stage in stages for first in range(0, size, self.ep)]

    @property
    def replicas_in_step(self) -> bool:
        """Whether data replicas exchange tokens in every layer and must therefore run equally many microbatches."""
        return self.cp * self.tp % self.ep != 0

    def first_copy(self, replica: int, context_rank: int) -> tuple[int, int]:
        """Return (replica, context rank) of the first copy whose ranks hold the same experts as the copy in the
        arguments."""
        same_context = self.tp % self.ep == 0
        return replica if self.replicas_in_step else 0, 0 if same_context else context_rank

    def replica_ranks(self, replica: int) -> Sequence[int]:
        """Return all ranks of a replica."""
        return self.ranks[replica * self.model_ranks : (replica + 1) * self.model_ranks]

    def output_rank(self, replica: int) -> int:
        """Return the rank that sends a replica's results: last stage, first context rank and first tensor rank."""
        return self.rank(replica, self.pp - 1, 0)

    def place(self, rank: int) -> tuple[int, int, int, int] | None:
        """Return (replica, stage, context rank, tensor rank) of a global rank, or None outside the role."""
        if rank not in self.ranks:
            return None
        index, tensor_rank = divmod(self.ranks.index(rank), self.tp)
        index, context_rank = divmod(index, self.cp)
        return index // self.pp, index % self.pp, context_rank, tensor_rank

    def stage_of(self, rank: int) -> int | None:
        """Return the pipeline stage of a global rank, or None outside the role."""
        place = self.place(rank)
        return place[1] if place is not None else None

    def replica_of(self, rank: int) -> int | None:
        """Return the data replica of a global rank, or None outside the role."""
        place = self.place(rank)
        return place[0] if place is not None else None

    def stage_of_replica(self, replica: int, stage: int) -> list[int]:
        """Return the ranks of a stage that process a replica's microbatches together."""
        return [self.rank(replica, stage, t, c) for c in range(self.cp) for t in range(self.tp)]


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as in `0-3, 6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"


def format_rank_list(ranks: Sequence[int]) -> str:
    """Format ranks as in `rank 6` or `ranks 0-3, 6`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"
