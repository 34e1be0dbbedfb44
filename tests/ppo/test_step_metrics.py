"""Metrics of a step agree with the description of each metric: small inputs, computed in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.ppo.experience import ExperienceMaker
from megappo.ppo.loaded import failure_metrics
from megappo.rewards.processes.workers import TIMED_OUT
from megappo.types import Scored
from tests.ppo.test_experience import CPU, MASK, rollouts

pytestmark = pytest.mark.usefixtures("world_of_one")

GAPS = [[0.1, -0.9], [0.9, 0.4, -0.2, math.log(2)]]
"""Log-probability of the trainer minus log-probability of the engine, for the tokens of MASK."""


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("above", "below"), [(None, None), (2.2, None), (None, 0.8), (2.2, 0.8)])
def test_correction_metrics_match_numpy(level: str, above: float | None, below: float | None) -> None:
    engine = torch.full(MASK.shape, -3.0)
    old = engine + torch.tensor([[*gaps, *[math.nan] * (4 - len(gaps))] for gaps in GAPS])
    correction = {"level": level, "cap": 2.0, "reject_above": above, "reject_below": below}
    settings: dict[str, Any] = {"estimator": "grpo", "old_logprob": "corrected", "correction": correction}
    made = ExperienceMaker(AlgorithmSettings.model_validate(settings), CPU)
    experience, numbers = made.make(Scored(rollouts(engine, MASK), torch.tensor([1.0, 0.0]), old, None, None), 2)
    of_samples = {"token": lambda x: x, "sequence": lambda x: [sum(x)] * len(x),
                  "geometric": lambda x: [sum(x) / len(x)] * len(x)}[level]  # fmt: skip
    ratios = np.exp([float(np.float32(gap)) for gaps in GAPS for gap in of_samples(gaps)])
    is_accepted = [(above is None or r <= above) and (below is None or r >= below) for r in ratios]
    assert numbers["correction/weight_mean"] == pytest.approx(np.minimum(ratios, 2.0).mean(), rel=1e-6)
    assert numbers["correction/truncated"] == pytest.approx(np.mean(ratios > 2 - 1e-6))
    assert numbers["correction/rejected"] == pytest.approx(1 - np.mean(is_accepted))
    assert experience.loss_mask_BR[MASK].tolist() == is_accepted


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "grpo", "rloo"])
def test_advantage_spread_before_whitening(estimator: str, size: float) -> None:
    """The two samples have 2 and 4 tokens, the scores `size` and 3 * `size`, and the values 0.5 * `size` and `size`.
    The values of masked tokens are NaN."""
    nothing, values = torch.zeros(MASK.shape), torch.tensor([[0.5], [1.0]]).expand(MASK.shape) * size
    critic_values = values.masked_fill(~MASK, math.nan) if estimator == "gae" else None
    scored = Scored(rollouts(nothing, MASK), torch.tensor([1.0, 3.0]) * size, nothing, None, critic_values)
    standard = size / (2**0.5 * size + 1e-6)
    first, second = {
        "gae": (0.5 * size, 2.0 * size),
        "reinforce_plus_plus": (size, 3.0 * size),
        "rloo": (-2.0 * size, 2.0 * size),
        "grpo": (-standard, standard),
    }[estimator]
    raw = np.std([first] * 2 + [second] * 4)
    for whitens in (True, False):
        made = ExperienceMaker(AlgorithmSettings(estimator=estimator, whiten_advantages=whitens), CPU)
        numbers = made.make(scored, 2)[1]
        assert numbers["advantage/std_raw"] == pytest.approx(raw, rel=1e-5)
        is_white = whitens and estimator in ("gae", "reinforce_plus_plus")
        white = raw / (raw**2 + 1e-8) ** 0.5
        assert numbers["advantage/std"] == pytest.approx(white if is_white else raw, rel=1e-5)


def test_advantage_spread_is_absent_without_tokens() -> None:
    nothing = torch.zeros(MASK.shape)
    made = ExperienceMaker(AlgorithmSettings(estimator="grpo"), CPU)
    numbers = made.make(Scored(rollouts(nothing, MASK & False), torch.ones(2), nothing, None, None), 2)[1]
    assert "advantage/std_raw" not in numbers and "advantage/std" not in numbers


def test_failures_of_saved_rewards() -> None:
    """With several functions, a reason begins with the name of its function."""
    reasons = ("", TIMED_OUT, "the function raised ValueError: no", f"length: {TIMED_OUT}", "", "", "", "")
    saved_rollouts = replace(rollouts(torch.zeros(8, 1), torch.ones(8, 1) > 0), reward_failures=reasons)
    assert failure_metrics(saved_rollouts, CPU) == {"reward/failures": 3 / 8, "reward/timeouts": 2 / 8}
    unknown = replace(saved_rollouts, reward_failures=None)
    assert failure_metrics(unknown, CPU) == {"reward/failures": 0.0, "reward/timeouts": 0.0}


def test_metrics_of_rewards_returns_and_kl() -> None:
    """The samples have 2 and 4 tokens and the scores 1 and 3. The KL weight is 0.1, and gamma is 0.5."""
    old = torch.tensor([[-1.0, -2.0, math.nan, math.nan], [-0.5, -0.25, -1.5, -3.0]])
    ref = torch.tensor([[-1.5, -2.0, math.inf, math.nan], [-0.5, -1.25, -1.0, -2.0]])
    settings = {"estimator": "reinforce_plus_plus", "gamma": 0.5, "whiten_advantages": False,
                "kl_in_reward": {"coef": 0.1, "kind": "mse", "per": "response"}}  # fmt: skip
    made = ExperienceMaker(AlgorithmSettings.model_validate(settings), CPU)
    numbers = made.make(Scored(rollouts(old, MASK), torch.tensor([1.0, 3.0]), old, ref, None), 2)[1]
    kl = [[0.125, 0.0], [0.0, 0.5, 0.125, 0.5]]
    returns = []
    for score, of_sample in zip((1.0, 3.0), kl, strict=True):
        rewards, later = [-0.1 * x for x in of_sample], 0.0
        rewards[-1] += score
        for reward in reversed(rewards):
            later = reward + 0.5 * later
            returns.append(later)
    expected = {
        "kl/mean": 1.25 / 6, "kl/per_response": (0.125 + 1.125) / 2, "kl/coef": 0.1, "reward/mean": 2.0,
        "reward/std": 1.0, "reward/min": 1.0, "reward/max": 3.0, "return/mean": np.mean(returns),
        "advantage/mean": np.mean(returns), "advantage/std": np.std(returns), "advantage/std_raw": np.std(returns),
    }  # fmt: skip
    assert numbers == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}
