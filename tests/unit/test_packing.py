"""Plans of microbatches: complete, within budget, balanced, the same on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megappo.megatron.packing import Microbatch, balance, pack, plan_microbatches

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(50, 120))
def test_pack_is_complete_and_within_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in b) <= budget for b in bins)


@given(LENGTHS, st.integers(50, 120))
def test_pack_makes_no_more_bins_than_it_needs(lengths: list[int], budget: int) -> None:
    """The tokens ask for so many, or one bin less would overflow."""
    bins = pack(lengths, budget)
    fewest = math.ceil(sum(lengths) / budget)
    if len(bins) > fewest:
        smaller = balance(lengths, len(bins) - 1)
        assert max(sum(lengths[i] for i in b) for b in smaller) > budget
    assert len(bins) >= fewest


def test_pack_by_hand() -> None:
    """Bins are full to the last token, equal lengths go to bins in turn, and nothing makes no bin."""
    assert pack([8] * 6, 16) == [[0, 3], [1, 4], [2, 5]]
    assert pack([16, 10, 6, 9, 7], 16) == [[0], [1, 2], [3, 4]]
    assert pack([5], 5) == [[0]]
    assert pack([], 5) == []


def test_a_plan_by_hand() -> None:
    """The longest samples go to different replicas; the shortest, the first of several, fills what is missing."""
    plan = plan_microbatches({7: 50, 3: 40, 5: 30, 2: 10, 9: 10}, replicas=2, budget_tokens=60)
    assert [[m.sample_ids for m in replica] for replica in plan.replicas] == [[(7,), (2, 9)], [(3,), (5,)]]
    assert not any(m.is_filler for replica in plan.replicas for m in replica)
    uneven = plan_microbatches({7: 50, 3: 40, 5: 30}, replicas=2, budget_tokens=60)
    assert uneven.replicas == ((Microbatch((7,)),), (Microbatch((3,)), Microbatch((5,))))
    alone = plan_microbatches({4: 5, 1: 9}, replicas=3, budget_tokens=60, multiple_of=2)
    assert alone.replicas == (
        (Microbatch((1,)), Microbatch((4,), is_filler=True)),
        (Microbatch((4,)), Microbatch((4,), is_filler=True)),
        (Microbatch((4,), is_filler=True),) * 2,
    )
    assert alone.replica_of() == {1: 0, 4: 1}


@given(st.lists(st.integers(1, 4), max_size=12), st.integers(1, 4))
@example([4, 2, 2, 1], 2)
def test_each_item_goes_to_the_lightest_bin(costs: list[int], n: int) -> None:
    """The costliest first; of bins as light as each other to the one with fewer items, then to the first."""
    bins: list[list[int]] = [[] for _ in range(n)]
    for _, index in sorted((-cost, index) for index, cost in enumerate(costs)):
        min(bins, key=lambda b: (sum(costs[i] for i in b), len(b))).append(index)
    assert balance(costs, n) == [sorted(b) for b in bins]


@given(LENGTHS, st.integers(1, 5))
def test_balance_is_close(lengths: list[int], n: int) -> None:
    sums = [sum(lengths[i] for i in b) for b in balance(lengths, n)]
    assert sum(sums) == sum(lengths)
    # Greedy by length: the fullest bin exceeds the emptiest by at most one item.
    assert max(sums) - min(sums) <= max(lengths)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 3))
def test_plan_places_every_sample_once(lengths: list[int], replicas: int, multiple: int) -> None:
    ids = {1000 - i: n for i, n in enumerate(lengths)}
    plan = plan_microbatches(ids, replicas=replicas, budget_tokens=60, multiple_of=multiple)
    placed = [i for r in plan.replicas for m in r if not m.is_filler for i in m.sample_ids]
    assert sorted(placed) == sorted(ids)
    assert all(len(r) > 0 and len(r) % multiple == 0 for r in plan.replicas)
    shuffled = dict(reversed(list(ids.items())))
    assert plan_microbatches(shuffled, replicas=replicas, budget_tokens=60, multiple_of=multiple) == plan
    places = plan.replica_of()
    assert list(places) == sorted(ids)
    for d, microbatches in enumerate(plan.replicas):
        assert all(places[i] == d for m in microbatches if not m.is_filler for i in m.sample_ids)


@given(LENGTHS, st.integers(2, 5), st.integers(1, 3))
def test_replicas_that_share_experts_run_as_many_microbatches(lengths: list[int], replicas: int, multiple: int) -> None:
    settings: dict[str, Any] = {"replicas": replicas, "budget_tokens": 60, "multiple_of": multiple}
    plan = plan_microbatches(dict(enumerate(lengths)), in_step=True, **settings)
    assert len({len(r) for r in plan.replicas}) == 1
    without = plan_microbatches(dict(enumerate(lengths)), **settings)
    assert [[m for m in r if not m.is_filler] for r in plan.replicas] == [
        [m for m in r if not m.is_filler] for r in without.replicas
    ]
    assert len(plan.replicas[0]) == max(len(r) for r in without.replicas)


def test_too_long_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="101 tokens exceeds the microbatch budget of 100 tokens; raise"):
        pack([101], 100)
