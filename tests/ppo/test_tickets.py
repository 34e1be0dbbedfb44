"""Tests of the selection of prompts in flight for a step."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from megappo.ppo.rollout.tickets import Group, choose


def groups(*versions: int, finished: Sequence[int]) -> list[Group]:
    return [Group(i, i, version, i in finished) for i, version in enumerate(versions)]


def tickets(chosen: list[Group] | None) -> list[int] | None:
    return None if chosen is None else [group.ticket for group in chosen]


def test_step_takes_oldest_groups_first() -> None:
    some = groups(4, 4, 4, 5, 5, 5, finished=(1, 3, 4, 5))
    assert tickets(choose(some, size=2, newest=5, max_lag=3)) == [1, 3]
    assert choose(some, size=5, newest=5, max_lag=3) is None


def test_step_waits_for_groups_near_the_age_limit() -> None:
    """The limit allows prompts 0 to 2 in this step and the next. Each step trains two prompts, so this step must take
    at least one of the three. Five prompts of that age would require three in this step, which is too many."""
    some = groups(4, 4, 4, 5, 5, 5, finished=(3, 4, 5))
    assert choose(some, size=2, newest=5, max_lag=2) is None
    some[1].finished = True
    assert tickets(choose(some, size=2, newest=5, max_lag=2)) == [1, 3]
    # Further rounds belong to the same step. The two old groups still fit, because each later step takes two.
    assert tickets(choose([some[0], *some[2:]], size=1, newest=5, max_lag=2, of_step=2)) == [3]
    assert choose([some[0], *some[2:]], size=1, newest=5, max_lag=2) is None
    # The last possible step takes all of the old groups.
    assert choose(some, size=3, newest=6, max_lag=2) is None


@given(
    ahead=st.integers(2, 5), more=st.integers(0, 2), size=st.integers(1, 4), seed=st.integers(0, 999),
    oldest_last=st.booleans(),
)  # fmt: skip
def test_no_group_exceeds_the_age_limit(ahead: int, more: int, size: int, seed: int, oldest_last: bool) -> None:
    """The oldest groups may finish last. Without waiting, these groups would become too old."""
    drawn, some, sent = random.Random(seed), list[Group](), 0
    for newest in range(1, 12):
        while True:
            while len(some) < ahead * size:
                some.append(Group(sent, sent, newest))
                sent += 1
            chosen = choose(some, size=size, newest=newest, max_lag=ahead + more)
            if chosen is not None:
                break
            unfinished = [group for group in some if not group.finished]
            (unfinished[-1] if oldest_last else drawn.choice(unfinished)).finished = True
        assert len(chosen) == size and all(group.finished for group in chosen)
        some = [group for group in some if group not in chosen]
        assert all(newest - group.version <= ahead + more for group in chosen)
        assert all(newest + 1 - group.version <= ahead + more for group in some)  # all stay usable in the next step
