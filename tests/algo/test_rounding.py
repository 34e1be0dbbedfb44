"""Deviations from a baseline caused by rounding are exactly 0, and the tokens are not clipped."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from megappo.algo.estimators import builtin
from megappo.config import load_config
from megappo.ppo.experience import groups_differ_G
from megappo.ppo.rollout.selection import Selection
from megappo.ppo.shaping import RewardShaper
from megappo.runtime.ranks.tally import Totals
from megappo.types import Episode, Episodes
from megappo_kernels.backend import Backend, use_backend
from megappo_kernels.losses import PolicyInputs, ppo_token_loss
from megappo_kernels.metrics import shown
from megappo_kernels.whiten import masked_whiten, masked_whiten_stats
from tests.ppo.test_selection import rollouts
from tests.support.places import BASE

ONE_AT_THE_MEAN = [
    [0.2, 0.45, 0.45, 0.7], [0.7, 0.45, 0.2], [0.1, 0.3, 0.5], [0.1, 0.7, 1.3], [-0.3, -0.2, -0.1],
    [0.9, 0.8, 0.85, 0.85, 0.85], [1e-4, 3e-4, 2e-4], [1000.2, 1000.45, 1000.45, 1000.7], [-5000.1, -5000.3, -5000.2],
    [1e5 + 0.2, 1e5 + 0.45, 1e5 + 0.45, 1e5 + 0.7],
]  # fmt: skip
"""Lists of scores that contain their mean."""


def advantages(estimator: str, scores: list[float]) -> Tensor:
    """Return the advantages (B, 2) of a group of samples. Each sample has two tokens that share the score."""
    rewards = torch.tensor(scores)[:, None] * torch.tensor([0.25, 0.75])
    result, _ = builtin(estimator)(
        rewards=rewards, values=None, mask=torch.ones(rewards.shape, dtype=torch.bool),
        group_ids=torch.zeros(len(scores), dtype=torch.int64), gamma=1.0, lam=1.0,
    )  # fmt: skip
    return result


@pytest.mark.parametrize("scores", ONE_AT_THE_MEAN, ids=str)
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_scores_at_the_mean_have_no_advantage(estimator: str, scores: list[float]) -> None:
    result = advantages(estimator, scores)
    exact = torch.tensor(scores, dtype=torch.float64)
    is_mean = (exact - exact.mean()).abs() < 1e-4 * exact.std()
    assert is_mean.any() and not is_mean.all()
    assert (result[is_mean] == 0).all() and (result[~is_mean] != 0).all()
    scale = exact.std() if estimator == "grpo" else (len(scores) - 1) / len(scores)
    expected = (exact - exact.mean()) / (scale + 1e-6 * (estimator == "grpo"))
    spacing = float(exact.abs().max()) * 2**-23
    torch.testing.assert_close(result[:, 0].double(), expected, rtol=1e-5, atol=8 * spacing / float(scale))


@pytest.mark.parametrize("scores", ONE_AT_THE_MEAN, ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_whitening_sets_rounding_errors_to_zero(backend: Backend, scores: list[float]) -> None:
    values, mask = torch.tensor([scores]), torch.ones(1, len(scores), dtype=torch.bool)
    with use_backend(backend):
        white = masked_whiten(values, mask, masked_whiten_stats(values, mask))[0]
    exact = torch.tensor(scores, dtype=torch.float64)
    is_mean = (exact - exact.mean()).abs() < 1e-4 * exact.std()
    assert torch.equal(white == 0, is_mean)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_equal_values_whiten_to_exactly_zero(backend: Backend) -> None:
    g = torch.Generator().manual_seed(0)
    for value in (0.1, 3.3, -0.7, 1e6 + 0.1, 1e-5):
        for tokens in (3, 7, 1000, 9000):
            values, mask = torch.full((1, tokens), value), torch.rand(1, tokens, generator=g) > 0.3
            with use_backend(backend):
                assert (masked_whiten(values, mask, masked_whiten_stats(values, mask)) == 0).all()


@pytest.mark.parametrize(
    "scores", [[1e6, 1e6 + 1], [1e6 + 0.25, 1e6 + 0.5], [0.0, 1e-7], [1.0, 1.000001], [1e-30, 0.0]]
)
def test_real_small_differences_are_preserved(scores: list[float]) -> None:
    rloo = advantages("rloo", scores)[:, 0].double()
    apart = float(torch.tensor(scores[0]).double() - torch.tensor(scores[1]).double())
    assert rloo.tolist() == pytest.approx([apart, -apart], rel=1e-6)
    assert groups_differ_G(torch.tensor(scores), torch.zeros(2, dtype=torch.int64)).tolist() == [True]


def with_turns(*rewards: list[float]) -> Tensor:
    """Return the rewards (B, R) of turns. Each turn has one token."""
    longest = max(map(len, rewards))
    return torch.tensor([[*of_sample, *[0.0] * (longest - len(of_sample))] for of_sample in rewards])


def test_reward_sums_with_different_rounding_are_equal() -> None:
    """Groups of two samples. The sums of the first three groups are equal: 1, 0.3 and 0. The last sums differ."""
    groups = [([0.1] * 10, [1.0]), ([0.1, 0.2], [0.3]), ([0.1, 0.2, -0.3], [0.0]), ([0.1, 0.2], [0.31])]
    turns_BR = with_turns(*(of_sample for group in groups for of_sample in group))
    B, R = turns_BR.shape
    batch = rollouts("abcdefgh", [R] * B)
    episodes = Episodes((Episode(()),) * B, turns_BR, ((),) * B)
    batch = replace(batch, episodes=episodes)
    assert batch.total_rewards_B(torch.zeros(B))[2].item() == batch.total_rewards_B(torch.zeros(B))[3].item()
    parts_BN = batch.reward_parts_BN(torch.zeros(B))
    assert groups_differ_G(parts_BN, batch.group_ids_B).tolist() == [False, False, False, True]
    rloo, _ = builtin("rloo")(
        rewards=turns_BR, values=None, mask=batch.response_mask_BR, group_ids=batch.group_ids_B, gamma=1.0, lam=1.0
    )
    assert (rloo[:6] == 0).all() and (rloo[6:] != 0).all()


@pytest.mark.usefixtures("world_of_one")
def test_dynamic_sampling_ignores_rounding_differences() -> None:
    chosen, summed = Selection(prompts=1, samples_per_prompt=2, max_rounds=2), sum([torch.tensor(0.1)] * 10)
    assert float(summed) > 1, "ten times 0.1, summed in float32"
    chosen.add(rollouts("abcd", [1, 1, 1, 1]), torch.tensor([1.0, float(summed), 0.5, 0.5]), Totals({}, {}, {}))
    assert (chosen.kept, chosen.wanted) == (0, 1)
    chosen.add(rollouts("ef", [1, 1]), torch.tensor([1.0, 0.999]), Totals({}, {}, {}))
    assert (chosen.kept, chosen.wanted) == (1, 0)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(("normalize", "shaped"), [("std", [1.0, 1.0]), ("mean_std", [0.0, 0.0])])
def test_equal_scores_are_not_divided_by_rounding(normalize: str, shaped: list[float]) -> None:
    shaper = RewardShaper(load_config(BASE, [f"reward.normalize={normalize}"]), torch.device("cpu"))
    scores_B, _ = shaper.shape(torch.tensor([1.0, 1.0000001]), rollouts("ab", [1, 1]))
    assert scores_B.tolist() == pytest.approx(shaped, abs=2e-7)


def test_tokens_without_an_advantage_are_not_clipped() -> None:
    """RLOO with scores of 0.2, 0.45, 0.45 and 0.7. In each sample, the first token rises by 0.5 nats and the second
    falls by 0.5 nats. Two samples have an advantage. One token of each is clipped."""
    rloo = advantages("rloo", [0.2, 0.45, 0.45, 0.7])
    logprob = torch.full((4, 2), -1.0)
    inputs = PolicyInputs(logprob - torch.tensor([0.5, -0.5]), rloo, torch.ones(4, 2), torch.ones(4, 2) > 0)
    for backend in get_args(Backend):
        with use_backend(backend):
            out = ppo_token_loss(logprob=logprob, inputs=inputs)
        numbers = shown([{name: float(x) for name, x in out.metrics.items()}])
        assert numbers["clipfrac"] == 2 / 8
        # Weights are the ratios: e^0.5 and e^-0.5 of three samples' tokens, 0 where clipped.
        up, down = 3 * 1.6487212707, 3 * 0.6065306597
        size = (up + down) ** 2 / 8 / (3 * 1.6487212707**2 + 3 * 0.6065306597**2)
        assert numbers["effective_sample_size"] == pytest.approx(size, rel=1e-6)
