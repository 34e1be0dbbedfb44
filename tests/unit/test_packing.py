"""Plans of microbatches: complete, within budget, balanced, the same on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.models.packing import balance, pack, plan_microbatches

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(50, 120))
def test_pack_is_complete_and_within_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in b) <= budget for b in bins)


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
    # A filler's sample travels to the replica that repeats it.
    places = plan.replicas_of()
    for d, microbatches in enumerate(plan.replicas):
        assert all(d in places[i] for m in microbatches for i in m.sample_ids)


@given(LENGTHS, st.integers(2, 5), st.integers(1, 3))
def test_replicas_that_share_experts_run_as_many_microbatches(lengths: list[int], replicas: int, multiple: int) -> None:
    settings = {"replicas": replicas, "budget_tokens": 60, "multiple_of": multiple}
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
