"""Assigns samples to data parallel replicas and packs them into microbatches.

Pure functions of the lengths in integers: every rank computes the same plan from the all-gathered lengths.
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
    """Whether it repeats a sample with zero weight, because a schedule needs a multiple of microbatches."""


@dataclass(frozen=True)
class MicrobatchPlan:
    """replicas[d] lists the microbatches of data parallel replica d in order."""

    replicas: tuple[tuple[Microbatch, ...], ...]
    busiest_flops: int
    """FLOPs of the busiest replica, fillers included. Where replicas wait for each other in every microbatch: the sum
    over microbatches of the costliest one."""
    mean_flops: float
    """Mean FLOPs of the replicas, without fillers."""

    def replica_of(self) -> dict[int, int]:
        """The replica that processes each sample, by ascending sample id; fillers are left out."""
        places = (
            (sample_id, replica)
            for replica, microbatches in enumerate(self.replicas)
            for microbatch in microbatches
            if not microbatch.is_filler
            for sample_id in microbatch.sample_ids
        )
        return dict(sorted(places))


def balance(costs: Sequence[int], n_bins: int) -> list[list[int]]:
    """Distribute items over bins so that the sums are close (longest processing time first, Graham 1969).

    Returns lists of item indices in increasing order; deterministic, ties go to the emptier, then the lower bin.
    """
    heap = [(0, 0, b) for b in range(n_bins)]
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        total, _, b = heapq.heappop(heap)
        bins[b].append(index)
        heapq.heappush(heap, (total + costs[index], len(bins[b]), b))
    return [sorted(b) for b in bins]


def pack(lengths: Sequence[int], budget_tokens: int, cost: SampleCost) -> list[list[int]]:
    """Pack items into the fewest bins of at most `budget_tokens` tokens with about equal costs, the costliest bin
    first.

    Raises ValueError where a single item exceeds the budget.
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
        # Bins of equal costs may be over the budget where bins of equal tokens are not.
        for evened in (costs, lengths):
            bins = balance(evened, n_bins)
            if max(sum(lengths[i] for i in b) for b in bins) <= budget_tokens:
                return sorted((b for b in bins if b), key=lambda b: -sum(costs[i] for i in b))
        return None

    halves = sum(2 * n > budget_tokens for n in lengths)  # no two of these fit into one bin
    return fewest(max(-(-sum(lengths) // budget_tokens), halves), packed)


def fewest(n_bins: int, packed: Callable[[int], list[list[int]] | None]) -> list[list[int]]:
    """Find the first number of bins from `n_bins` on that can be packed, by doubling steps and then bisection of the
    last one."""
    found, step = packed(n_bins), 1
    while found is None:
        n_bins, step = n_bins + step, 2 * step
        found = packed(n_bins)
    too_few = n_bins - step // 2
    while n_bins - too_few > 1:
        middle = (too_few + n_bins) // 2
        fewer = packed(middle)
        if fewer is None:
            too_few = middle
        else:
            n_bins, found = middle, fewer
    return found


def plan_microbatches(
    lengths: Mapping[int, int],
    *,
    cost: SampleCost,
    replicas: int,
    budget_tokens: int,
    multiple_of: int = 1,
    in_step: bool = False,
) -> MicrobatchPlan:
    """Spread samples over replicas by cost and pack each replica's share by the budget.

    Args:
        lengths: tokens of each sample id; the order of the mapping does not matter.
        cost: cost model of a sample.
        replicas: data parallel size.
        budget_tokens: most tokens in a microbatch.
        multiple_of: every replica gets a multiple of this many microbatches (interleaved pipelines need it).
        in_step: every replica gets equally many microbatches (experts spread over replicas need it).

    A replica's missing microbatches are repetitions of the shortest sample that carry no weight, so every replica has
    at least one microbatch.
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
