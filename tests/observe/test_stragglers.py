"""Messages about slow ranks."""

from __future__ import annotations

from megappo.observe.stragglers import Stragglers


def test_slow_rank_is_reported_at_intervals() -> None:
    stragglers = Stragglers()
    seconds = {"rollout": [6.0, 6.1, 5.9, 12.0], "forward": [3.0, 3.0, 3.0, 3.1]}
    (sentence,) = stragglers.observe(1, seconds)
    assert "rank 3 was the slowest in rollout with 12.0 seconds, half of the ranks took at most 6.0" in sentence
    assert not stragglers.observe(20, seconds)
    assert stragglers.observe(21, seconds)


def test_slower_of_two_ranks_is_reported() -> None:
    assert "rank 0" in Stragglers().observe(1, {"reward": [9.0, 2.0]})[0]


def test_small_differences_are_not_reported() -> None:
    stragglers = Stragglers()
    assert not stragglers.observe(1, {"reward": [0.1, 1.0], "rollout": [100.0, 120.0], "sync": [1.0]})
