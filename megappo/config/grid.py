"""Where the parts of a role's model stand: the one place that knows the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Ranks of a role ordered as (data replica, pipeline stage, tensor rank), tensor rank fastest.

    Tensor parallel neighbours are the closest ranks because they talk the most. Experts are spread over the ranks of a
    stage in the order (expert replica, expert rank), expert rank fastest: an expert parallel group lies within a tensor
    parallel group, or spans data replicas where it is larger.
    """

    ranks: Sequence[int]
    """Global ranks, ascending; a range where there are many."""
    tp: int
    pp: int
    ep: int = 1

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pp

    @property
    def dp(self) -> int:
        """Number of replicas: ranks / (TP x PP)."""
        return len(self.ranks) // self.model_ranks

    @property
    def expert_replicas(self) -> int:
        """Copies of the experts of a stage."""
        return self.dp * self.tp // self.ep

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
        return self.rank(expert_rank // self.tp, stage, expert_rank % self.tp)

    @property
    def tensor_groups(self) -> list[list[int]]:
        """Ranks that share each layer of a stage."""
        return [[self.rank(d, p, t) for t in range(self.tp)] for d in range(self.dp) for p in range(self.pp)]

    @property
    def pipeline_groups(self) -> list[list[int]]:
        """Ranks that hand microbatches from stage to stage."""
        return [[self.rank(d, p, t) for p in range(self.pp)] for d in range(self.dp) for t in range(self.tp)]

    @property
    def data_groups(self) -> list[list[int]]:
        """Groups of ranks whose weights are the same, experts aside: one rank of each replica."""
        return [[self.rank(d, p, t) for d in range(self.dp)] for p in range(self.pp) for t in range(self.tp)]

    @property
    def expert_groups(self) -> list[list[int]]:
        """Ranks that hold all experts of their stage together."""
        stages, size = [self.stage_ranks(stage) for stage in range(self.pp)], self.dp * self.tp
        return [stage[first : first + self.ep] for stage in stages for first in range(0, size, self.ep)]

    @property
    def replicas_in_step(self) -> bool:
        """Whether data replicas exchange tokens in every layer, so that all of them run as many microbatches."""
        return self.tp % self.ep != 0

    def replica_ranks(self, replica: int) -> Sequence[int]:
        """All ranks that hold one copy of the model."""
        return self.ranks[replica * self.model_ranks : (replica + 1) * self.model_ranks]

    def output_rank(self, replica: int) -> int:
        """The rank that hands out a replica's results: last stage, first tensor rank."""
        return self.rank(replica, self.pp - 1, 0)

    def place(self, rank: int) -> tuple[int, int, int] | None:
        """(replica, stage, tensor rank) of a global rank, None outside the role."""
        if rank not in self.ranks:
            return None
        index = self.ranks.index(rank)
        return index // self.model_ranks, index // self.tp % self.pp, index % self.tp

    def stage_of(self, rank: int) -> int | None:
        """Pipeline stage of a global rank, None outside the role."""
        place = self.place(rank)
        return place[1] if place is not None else None
