"""Assignment of samples to data parallel replicas and microbatches.

All functions are pure functions of integer lengths. Every rank computes the same plan from the all-gathered lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megappo.families.flops import SampleCost


@dataclass(frozen=True)
class Microbatch:
    """Samples that are packed into one sequence."""

    sample_ids: tuple[int, ...]
    is_filler: bool = False
    """Whether the microbatch repeats a sample with zero weight, because a schedule needs a multiple of microbatches."""


@dataclass(frozen=True)
class MicrobatchPlan:
    """Plan of microbatches. replicas[d] lists the microbatches of data parallel replica d in order."""

    replicas: tuple[tuple[Microbatch, ...], ...]
    busiest_flops: int
    """FLOPs of the busiest replica, including fillers. If replicas wait for each other in every microbatch, the value
    is the sum over microbatches of the most expensive one."""
    mean_flops: float
    """Mean FLOPs of the replicas, without fillers."""

    def replica_of(self) -> dict[int, int]:
        """Return the replica of each sample in ascending order of sample ids, without fillers."""
        places = (
            (sample_id, replica)
            for replica, microbatches in enumerate(self.replicas)
            for microbatch in microbatches
            if not microbatch.is_filler
            for sample_id in microbatch.sample_ids
        )
        return dict(sorted(places))


def balance(costs: Sequence[int], n_bins: int) -> list[list[int]]:
    """Distribute items over bins with similar sums (longest processing time first, Graham 1969).

    Return lists of item indices in increasing order. The result is deterministic. Ties go to the bin with fewer items,
    then to the lower bin.
    """
    heap = [(0, 0, b) for b in range(n_bins)]
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        total, _, b = heapq.heappop(heap)
        bins[b].append(index)
        heapq.heappush(heap, (total + costs[index], len(bins[b]), b))
    return [sorted(b) for b in bins]


def pack(lengths: Sequence[int], budget_tokens: int, cost: SampleCost) -> list[list[int]]:
    """Pack items into the fewest bins of at most `budget_tokens` tokens with similar costs. The bin with the highest
    cost is first.

    Raises ValueError if a single item exceeds the budget.
    """
    if not lengths:
        return []
    if max(lengths) > budget_tokens:
        raise ValueError(
            f"a sample of {max(lengths)} tokens exceeds the microbatch budget of {budget_tokens} tokens; "
            "raise microbatch_budget_tokens"
        )
    costs = [cost.of(n) for n in lengths]

    def packed(n_bins: int) -> list[list[int]] | None:
        # Bins of equal costs may exceed the budget even if bins of equal tokens do not.
        for evened in (costs, lengths):
            bins = balance(evened, n_bins)
            if max(sum(lengths[i] for i in b) for b in bins) <= budget_tokens:
                return sorted((b for b in bins if b), key=lambda b: -sum(costs[i] for i in b))
        return None

    halves = sum(2 * n > budget_tokens for n in lengths)  # two of these never fit into one bin
    return fewest(max(-(-sum(lengths) // budget_tokens), halves), packed)


def fewest(n_bins: int, packed: Callable[[int], list[list[int]] | None]) -> list[list[int]]:
    """Find the first number of bins, starting at `n_bins`, that can be packed. The search doubles its steps and then
    bisects the last step."""
    bins, step = packed(n_bins), 1
    while bins is None:
        n_bins, step = n_bins + step, 2 * step
        bins = packed(n_bins)
    too_few = n_bins - step // 2
    while n_bins - too_few > 1:
        middle = (too_few + n_bins) // 2
        fewer = packed(middle)
        if fewer is None:
            too_few = middle
        else:
            n_bins, bins = middle, fewer
    return bins


def plan_microbatches(
    lengths: Mapping[int, int],
    *,
    cost: SampleCost,
    replicas: int,
    budget_tokens: int,
    multiple_of: int = 1,
    in_step: bool = False,
) -> MicrobatchPlan:
    """Distribute samples over replicas by cost and pack the samples of each replica by the budget.

    Args:
        lengths: tokens of each sample id; the order of the mapping does not matter.
        cost: cost model of a sample.
        replicas: data parallel size.
        budget_tokens: largest number of tokens in a microbatch.
        multiple_of: factor of the number of microbatches on every replica (interleaved pipelines need it).
        in_step: whether every replica gets the same number of microbatches (experts spread over replicas need it).

    Missing microbatches of a replica repeat the shortest sample with zero weight. Every replica has at least one
    microbatch.
    """
    ids = sorted(lengths)
    costs = {i: cost.of(lengths[i]) for i in ids}
    planned: list[tuple[Microbatch, ...]] = []
    for share in balance(list(costs.values()), replicas):
        share_ids = [ids[i] for i in share]
        packs = pack([lengths[i] for i in share_ids], budget_tokens, cost)
        planned.append(tuple(Microbatch(tuple(share_ids[i] for i in indices)) for indices in packs))
    counts = [max(1, -(-len(microbatches) // multiple_of)) * multiple_of for microbatches in planned]
    if in_step:
        counts = [max(counts)] * replicas
    filler = Microbatch((min(ids, key=lambda i: (lengths[i], i)),), is_filler=True)
    filled = tuple(m + (filler,) * (count - len(m)) for m, count in zip(planned, counts, strict=True))
    spent = [[sum(costs[i] for i in m.sample_ids) for m in microbatches] for microbatches in filled]
    busiest = sum(map(max, zip(*spent, strict=True))) if in_step else max(map(sum, spent))
    return MicrobatchPlan(filled, busiest, sum(costs.values()) / replicas)
