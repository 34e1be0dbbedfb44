"""Microbatch plans are complete, within budget, balanced and equal on all ranks."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.families import architecture
from megappo.families.flops import SampleCost, sample_cost
from megappo.megatron import packing
from megappo.megatron.packing import Microbatch, balance, fewest, pack, plan_microbatches

TOKENS = SampleCost(of_token=1, of_pair=0)
QUADRATIC = SampleCost(of_token=20, of_pair=3, window=30)
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(50, 120))
def test_pack_is_complete_and_within_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget, TOKENS)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in b) <= budget for b in bins)


@given(LENGTHS, st.integers(50, 120))
def test_pack_uses_the_minimum_number_of_bins(lengths: list[int], budget: int) -> None:
    """The tokens require the number of bins, or one bin fewer would exceed the budget."""
    bins = pack(lengths, budget, TOKENS)
    fewest = math.ceil(sum(lengths) / budget)
    if len(bins) > fewest:
        smaller = balance(lengths, len(bins) - 1)
        assert max(sum(lengths[i] for i in b) for b in smaller) > budget
    assert len(bins) >= fewest


def test_pack_by_hand() -> None:
    """Bins can be completely full. Equal lengths are distributed in turn. An empty list has no bins."""
    assert pack([8] * 6, 16, TOKENS) == [[0, 3], [1, 4], [2, 5]]
    assert pack([16, 10, 6, 9, 7], 16, TOKENS) == [[0], [1, 2], [3, 4]]
    assert pack([5], 5, TOKENS) == [[0]]
    assert pack([], 5, TOKENS) == []


def test_plan_by_hand() -> None:
    """The longest samples go to different replicas. The first of the shortest samples is the filler."""
    plan = plan_microbatches({7: 50, 3: 40, 5: 30, 2: 10, 9: 10}, cost=TOKENS, replicas=2, budget_tokens=60)
    assert [[m.sample_ids for m in replica] for replica in plan.replicas] == [[(7,), (2, 9)], [(3,), (5,)]]
    assert not any(m.is_filler for replica in plan.replicas for m in replica)
    uneven = plan_microbatches({7: 50, 3: 40, 5: 30}, cost=TOKENS, replicas=2, budget_tokens=60)
    assert uneven.replicas == ((Microbatch((7,)),), (Microbatch((3,)), Microbatch((5,))))
    alone = plan_microbatches({4: 5, 1: 9}, cost=TOKENS, replicas=3, budget_tokens=60, multiple_of=2)
    assert alone.replicas == (
        (Microbatch((1,)), Microbatch((4,), is_filler=True)),
        (Microbatch((4,)), Microbatch((4,), is_filler=True)),
        (Microbatch((4,), is_filler=True),) * 2,
    )
    assert alone.replica_of() == {1: 0, 4: 1}


@given(st.integers(1, 20), st.integers(1, 200))
@example(1, 2)
@example(3, 7)
def test_smallest_number_of_bins_by_doubling_steps(start: int, fits: int) -> None:
    """The result is the smallest number of bins from `start` that fits. The number of attempts is logarithmic."""
    tried: list[int] = []

    def packed(n_bins: int) -> list[list[int]] | None:
        tried.append(n_bins)
        return [[n_bins]] if n_bins >= fits else None

    assert fewest(start, packed) == [[max(start, fits)]]
    steps = [start + 2**i - 1 for i in range(max(0, fits - start).bit_length() + 1)]
    assert tried[: len(steps)] == steps
    assert len(tried) <= 2 * len(steps) - (1 if len(steps) < 3 else 2)


@pytest.mark.parametrize("lengths", [[8] * 6, [9] * 8, [16, 9, 7]])
def test_packing_starts_at_the_lower_bound(lengths: list[int]) -> None:
    """The lower bound is the number of bins that the tokens require, or the number of samples above half a bin. In
    these cases the first attempt fits."""
    with mock.patch.object(packing, "balance", wraps=balance) as tries:
        bins = pack(lengths, 16, TOKENS)
    tries.assert_called_once_with(lengths, len(bins))


@given(st.lists(st.integers(1, 4), max_size=12), st.integers(1, 4))
@example([4, 2, 2, 1], 2)
def test_each_item_goes_to_the_lightest_bin(costs: list[int], n: int) -> None:
    """Items are assigned in order of decreasing cost. Ties go to the bin with fewer items, then to the first bin."""
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
    settings: dict[str, Any] = {"cost": QUADRATIC, "replicas": replicas, "budget_tokens": 60, "multiple_of": multiple}
    plan = plan_microbatches(ids, **settings)
    placed = [i for r in plan.replicas for m in r if not m.is_filler for i in m.sample_ids]
    assert sorted(placed) == sorted(ids)
    assert all(len(r) > 0 and len(r) % multiple == 0 for r in plan.replicas)
    shuffled = dict(reversed(list(ids.items())))
    assert (
        plan_microbatches(shuffled, cost=QUADRATIC, replicas=replicas, budget_tokens=60, multiple_of=multiple) == plan
    )
    places = plan.replica_of()
    assert list(places) == sorted(ids)
    for d, microbatches in enumerate(plan.replicas):
        assert all(places[i] == d for m in microbatches if not m.is_filler for i in m.sample_ids)


@given(st.integers(1, 40), st.integers(1, 50) | st.none())
def test_sample_cost_counts_attended_pairs(tokens: int, window: int | None) -> None:
    pairs = sum(1 for query in range(tokens) for key in range(query + 1) if window is None or query - key < window)
    assert SampleCost(7, 2, window).of(tokens) == 7 * tokens + 2 * pairs
    every = tokens * (tokens + 1) // 2
    assert SampleCost(7, 2, window, of_far_pair=3).of(tokens) == 7 * tokens + 2 * pairs + 3 * every


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("is_critic", [True, False])
def test_cost_matches_the_model(tied: bool, is_critic: bool) -> None:
    """The cost equals the FLOPs that PyTorch counts for forward and backward of the transformers model. The model
    computes all pairs of tokens. A critic has no output layer."""
    config = AutoConfig.for_model(
        "qwen3", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, vocab_size=50, tie_word_embeddings=tied,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    cost, n = sample_cost(architecture(config), is_critic=is_critic), 64
    with FlopCounterMode(display=False) as counter:
        tokens = torch.arange(n)[None] % 50
        output = model.model(tokens).last_hidden_state if is_critic else model(tokens).logits
        output.sum().backward()
    assert counter.get_total_flops() == n * (cost.of_token - 6 * norms) + n * n * cost.of_pair


def drawn_lengths(kind: str, count: int, generator: random.Random) -> list[int]:
    match kind:
        case "uniform":
            return [generator.randint(1, 4096) for _ in range(count)]
        case "lognormal":
            return [min(32768, max(1, int(generator.lognormvariate(6.5, 0.9)))) for _ in range(count)]
    return [generator.randint(50, 400) for _ in range(count - 1)] + [32768]


@pytest.mark.parametrize("kind", ["uniform", "lognormal", "giant"])
def test_replicas_have_equal_work(kind: str) -> None:
    """For 3,334 sets of lengths, the largest replica is within 5% of the lower bound."""
    generator = random.Random(kind)
    for _ in range(3334):
        replicas = generator.choice([2, 3, 4, 8, 16])
        lengths = drawn_lengths(kind, replicas * generator.randint(8, 24), generator)
        cost = SampleCost(of_token=generator.choice([500, 6_000, 24_000]), of_pair=1)
        costs = [cost.of(n) for n in lengths]
        spread = balance(costs, replicas)
        largest = max(sum(costs[i] for i in share) for share in spread)
        assert largest <= 1.05 * max(sum(costs) / replicas, *costs)


def test_work_of_a_plan_by_hand() -> None:
    """Fillers count as work. Replicas in step wait for the most expensive replica of each microbatch."""
    settings: dict[str, Any] = {"cost": TOKENS, "replicas": 2, "budget_tokens": 60}
    lengths = {7: 50, 3: 40, 5: 30, 2: 10, 9: 10}
    free, in_step = (plan_microbatches(lengths, in_step=step, **settings) for step in (False, True))
    assert (free.busiest_flops, free.mean_flops) == (70, 70)
    assert (in_step.busiest_flops, in_step.mean_flops) == (50 + 30, 70)
    alone = plan_microbatches({4: 5, 1: 9}, cost=TOKENS, replicas=3, budget_tokens=60, multiple_of=2)
    assert (alone.busiest_flops, alone.mean_flops) == (14, 14 / 3)


def test_long_sample_costs_more_than_its_tokens() -> None:
    """With a cost per token, the replica of the long sample also has another sample."""
    lengths = {0: 100, 1: 40, 2: 40, 3: 40, 4: 40}
    for cost, company in ((SampleCost(1, 1), {0}), (TOKENS, {0, 4})):
        replica_of = plan_microbatches(lengths, cost=cost, replicas=2, budget_tokens=200).replica_of()
        assert {i for i, replica in replica_of.items() if replica == replica_of[0]} == company


@given(LENGTHS, st.integers(50, 120))
def test_token_budget_applies_with_any_cost(lengths: list[int], budget: int) -> None:
    """The cost adds no bins, and the most expensive bin is first."""
    bins = pack(lengths, budget, QUADRATIC)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= budget for b in bins)
    assert len(bins) <= len(pack(lengths, budget, TOKENS))
    costs = [sum(QUADRATIC.of(lengths[i]) for i in b) for b in bins]
    assert costs == sorted(costs, reverse=True)


@given(LENGTHS, st.integers(2, 5), st.integers(1, 3))
def test_replicas_in_step_have_equal_microbatch_counts(lengths: list[int], replicas: int, multiple: int) -> None:
    settings: dict[str, Any] = {"cost": QUADRATIC, "replicas": replicas, "budget_tokens": 60, "multiple_of": multiple}
    plan = plan_microbatches(dict(enumerate(lengths)), in_step=True, **settings)
    assert len({len(r) for r in plan.replicas}) == 1
    without = plan_microbatches(dict(enumerate(lengths)), **settings)
    assert [[m for m in r if not m.is_filler] for r in plan.replicas] == [
        [m for m in r if not m.is_filler] for r in without.replicas
    ]
    assert len(plan.replicas[0]) == max(len(r) for r in without.replicas)


def test_too_long_sample_is_rejected() -> None:
    with pytest.raises(ValueError, match="101 tokens exceeds the microbatch budget of 100 tokens; raise"):
        pack([101], 100, TOKENS)
