"""Tests of the advantages of three-turn episodes. Tables that were computed by hand give the expected values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.config import ConfigError, derive, load_config
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.engines.protocol import Completion
from megappo.ppo.assembly.methods import check_methods
from megappo.ppo.experience import ExperienceMaker
from megappo.ppo.rollout.sampling import SampleRequests, finish_rollout
from megappo.types import Episode, Prompt, Rollouts, Scored, Turn
from tests.support.config import SHAPE
from tests.support.episodes import TOKENIZER
from tests.support.places import BASE

pytestmark = pytest.mark.usefixtures("world_of_one")

TOKENS = 12
TURNS = (
    # The environment adds tokens 3, 4 and 7, and 10 and 11 at the end.
    (Turn(0, 3, 0.25), Turn(5, 7, 0.5), Turn(8, 10)),
    # The first two turns are adjacent. The environment adds tokens 2 and 3.
    (Turn(0, 1, -0.25), Turn(1, 2, 0.5), Turn(4, 6)),
)
SCORES = (1.0, 0.25)
REWARDS = ({2: 0.25, 6: 0.5, 9: 1.0}, {0: -0.25, 1: 0.5, 5: 0.25})
VALUES = (
    {0: 0.5, 1: 0.25, 2: 0.5, 5: 0.75, 6: 0.25, 8: 0.5, 9: 0.25},
    {0: 0.5, 1: 0.25, 4: 1.0, 5: 0.5},
)
MONTE_CARLO = (
    {0: 1.75, 1: 1.75, 2: 1.75, 5: 1.5, 6: 1.5, 8: 1.0, 9: 1.0},
    {0: 0.5, 1: 0.75, 4: 0.25, 5: 0.25},
)
"""Undiscounted sum of rewards from each token to the end."""
# With gamma 1, delta = reward + value of the model's next token - value:
#   -0.25, 0.25, 0.5 | -0.5, 0.75 | -0.25, 0.75      and      -0.5 | 1.25 | -0.5, -0.25
TABLES: dict[str, tuple[dict[str, Any], tuple[dict[int, float], dict[int, float]]]] = {
    "1": (
        {"lam": 1.0},
        (
            {0: 1.25, 1: 1.5, 2: 1.25, 5: 0.75, 6: 1.25, 8: 0.5, 9: 0.75},
            {0: 0.0, 1: 0.5, 4: -0.75, 5: -0.25},
        ),
    ),
    "0.95": (
        {"lam": {"actor": 0.95, "critic": 1.0}},
        (
            {
                0: 0.97881587109375, 1: 1.293490390625, 2: 1.0984109375,
                5: 0.62990625, 6: 1.189375, 8: 0.4625, 9: 0.75,
            },
            {0: 0.02190625, 1: 0.549375, 4: -0.7375, 5: -0.25},
        ),
    ),
    # Lambda is 1 - 1 / (2/7 x tokens): 1/2 for 7 tokens and 1/8 for 4. Tokens of the environment do not count.
    "by length": (
        {"lam": {"actor": {"length_adaptive": 2 / 7}, "critic": 1.0}},
        (
            {0: -0.01171875, 1: 0.4765625, 2: 0.453125, 5: -0.09375, 6: 0.8125, 8: 0.125, 9: 0.75},
            {0: -0.35205078125, 1: 1.18359375, 4: -0.53125, 5: -0.25},
        ),
    ),
}  # fmt: skip


def table(rows: tuple[dict[int, float], ...], elsewhere: float = 0.0) -> Tensor:
    """Return the rows as a tensor (2, TOKENS)."""
    return torch.tensor([[row.get(t, elsewhere) for t in range(TOKENS)] for row in rows])


def two_episodes() -> Rollouts:
    """Return the samples of two episodes. The second episode is half as long."""
    completions = [
        Completion((5,) * n, (-1.0,) * n, False, 1, episode=Episode(turns))
        for n, turns in zip((TOKENS, 6), TURNS, strict=True)
    ]
    prompts = tuple(Prompt(i, (7,), "", None, {}) for i in range(2))
    return finish_rollout(SampleRequests(prompts, (0, 1), 1, ()), completions, TOKENIZER)


def estimated(**algorithm: Any) -> tuple[Tensor, Tensor]:
    """Return advantages and returns. Inputs at tokens of the environment are NaN."""
    rollouts = two_episodes()
    logprob = torch.where(rollouts.response_mask_BR, -1.0, math.nan)
    scored = Scored(rollouts, torch.tensor(SCORES), logprob, None, table(VALUES, math.nan))
    settings = AlgorithmSettings.model_validate({"whiten_advantages": False, **algorithm})
    experience, metrics = ExperienceMaker(settings, torch.device("cpu")).make(scored, 2)
    assert metrics["reward/mean"] == pytest.approx((1.75 + 0.5) / 2)
    return experience.advantages_BR, experience.returns_BR


def test_rewards_are_assigned_to_last_model_token() -> None:
    """With gamma 0, the return of a token is its own reward. No token of a tool gets the score."""
    _, returns = estimated(gamma=0.0, lam=1.0)
    torch.testing.assert_close(returns, table(REWARDS), rtol=0, atol=1e-7)


# gamma = lambda = 0.5 at the ends of turns, and 1 within turns. Deltas at the ends, with half of the value of the
# next turn's first token: 0.125, 0.5, 0.75 and -0.625, 0.75, -0.25. Everything after an end is weighted by a quarter.
BY_TURN = (
    {0: 0.15625, 1: 0.40625, 2: 0.15625, 5: 0.125, 6: 0.625, 8: 0.5, 9: 0.75},
    {0: -0.484375, 1: 0.5625, 4: -0.75, 5: -0.25},
)
# Without a critic: the rewards of this turn and later turns, halved once per turn: 0.25 + (0.5 + 1 / 2) / 2, ...
DISCOUNTED = (
    {0: 0.75, 1: 0.75, 2: 0.75, 5: 1.0, 6: 1.0, 8: 1.0, 9: 1.0},
    {0: 0.0625, 1: 0.625, 4: 0.25, 5: 0.25},
)


def test_turn_discounting_decays_at_turn_ends() -> None:
    algorithm: dict[str, Any] = {"gamma": 0.5, "lam": 0.5, "discount_at": "turn"}
    advantages, returns = estimated(**algorithm)
    torch.testing.assert_close(advantages, table(BY_TURN), rtol=0, atol=1e-7)
    torch.testing.assert_close(returns, table(BY_TURN) + table(VALUES), rtol=0, atol=1e-7)
    _, returns = estimated(**algorithm, estimator="reinforce_plus_plus")
    torch.testing.assert_close(returns, table(DISCOUNTED), rtol=0, atol=1e-7)


def test_turn_and_token_discounting_agree_without_decay() -> None:
    for by_token, by_turn in zip(estimated(lam=1.0), estimated(lam=1.0, discount_at="turn"), strict=True):
        torch.testing.assert_close(by_turn, by_token, rtol=0, atol=1e-6)


def own_estimator(*, rewards: Tensor, mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Discount without `gae`."""
    return gamma * rewards * mask, rewards * mask


ENVIRONMENT = (
    "rollout.environment={name: configs/examples/10_tools/lookup.py:Lookup}",
    "reward.function=environment",
)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "algorithm.discount_at is turn, but without rollout.environment a response is one turn; set it to token"),
        ((*ENVIRONMENT, "algorithm.estimator=grpo", "critic=null"), "algorithm.estimator 'grpo' does not use `gae`"),
        ((*ENVIRONMENT, "algorithm.estimator=rloo", "critic=null"), "algorithm.estimator 'rloo' does not use `gae`"),
        (
            (*ENVIRONMENT, "algorithm.estimator=tests.environments.test_turn_tables:own_estimator", "critic=null"),
            "test_turn_tables:own_estimator' does not use `gae`, which finds the ends of turns",
        ),
        ((*ENVIRONMENT, "algorithm.lam={actor: {length_adaptive: 0.05}}"), "depends on the tokens of a sample, but"),
    ],
)
def test_turn_discounting_without_turns_is_rejected(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config = load_config(BASE, ["algorithm.discount_at=turn", *overrides])
        derive(config, 1, SHAPE)
        check_methods(config)
    assert message in str(error.value)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_turn_discounting_accepts_gae_estimators(estimator: str) -> None:
    more = () if estimator == "gae" else ("critic=null",)
    overrides = ["algorithm.discount_at=turn", *ENVIRONMENT, f"algorithm.estimator={estimator}", *more]
    derive(load_config(BASE, overrides), 1, SHAPE)


@pytest.mark.parametrize("name", TABLES)
def test_advantages_propagate_across_turns(name: str) -> None:
    settings, rows = TABLES[name]
    advantages, returns = estimated(**settings)
    torch.testing.assert_close(advantages, table(rows), rtol=0, atol=1e-6)
    torch.testing.assert_close(returns, table(MONTE_CARLO), rtol=0, atol=1e-6)
