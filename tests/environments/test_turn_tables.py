"""Advantages of episodes of three turns, from what the engine and the environment gave, against tables by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.config.algorithm import AlgorithmSettings
from megappo.engines.protocol import Completion
from megappo.ppo.experience import ExperienceMaker
from megappo.ppo.sampling import SampleRequests, finish_rollout
from megappo.types import Episode, Prompt, Rollouts, Scored, Turn
from tests.support.episodes import TOKENIZER

pytestmark = pytest.mark.usefixtures("world_of_one")

TOKENS = 12
TURNS = (
    # The environment says tokens 3, 4 and 7, and has the last word with 10 and 11.
    (Turn(0, 3, 0.25), Turn(5, 7, 0.5), Turn(8, 10)),
    # The first two follow on one another; the environment says tokens 2 and 3.
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
"""Rewards from a token on."""
# With gamma 1 a token's delta is its reward and the value of the model's next token, less its own:
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
    # 1 - 1 / (2/7 x 7 tokens) is a half, and of 4 tokens an eighth; what the environment said does not count.
    "by length": (
        {"lam": {"actor": {"length_adaptive": 2 / 7}, "critic": 1.0}},
        (
            {0: -0.01171875, 1: 0.4765625, 2: 0.453125, 5: -0.09375, 6: 0.8125, 8: 0.125, 9: 0.75},
            {0: -0.35205078125, 1: 1.18359375, 4: -0.53125, 5: -0.25},
        ),
    ),
}  # fmt: skip


def table(rows: tuple[dict[int, float], ...], elsewhere: float = 0.0) -> Tensor:
    """(2, TOKENS)."""
    return torch.tensor([[row.get(t, elsewhere) for t in range(TOKENS)] for row in rows])


def two_episodes() -> Rollouts:
    """As the engine's and the environment's answers become a step's samples; the second is half as long."""
    completions = [
        Completion((5,) * n, (-1.0,) * n, False, 1, episode=Episode(turns))
        for n, turns in zip((TOKENS, 6), TURNS, strict=True)
    ]
    prompts = tuple(Prompt(i, (7,), "", None, {}) for i in range(2))
    return finish_rollout(SampleRequests(prompts, (0, 1), 1, ()), completions, TOKENIZER)


def estimated(**algorithm: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns, with rubbish wherever no token is the model's."""
    rollouts = two_episodes()
    logprob = torch.where(rollouts.response_mask_BR, -1.0, math.nan)
    scored = Scored(rollouts, torch.tensor(SCORES), logprob, None, table(VALUES, math.nan))
    settings = AlgorithmSettings.model_validate({"whiten_advantages": False, **algorithm})
    experience, metrics = ExperienceMaker(settings, torch.device("cpu")).make(scored, 2)
    assert metrics["reward/mean"] == pytest.approx((1.75 + 0.5) / 2)
    return experience.advantages_BR, experience.returns_BR


def test_rewards_land_on_the_last_token_that_the_model_said() -> None:
    """With gamma 0 a token's return is its own reward; the score stands on no tool's token."""
    _, returns = estimated(gamma=0.0, lam=1.0)
    torch.testing.assert_close(returns, table(REWARDS), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", TABLES)
def test_advantages_pass_from_the_end_of_a_turn_to_the_start_of_the_next(name: str) -> None:
    settings, rows = TABLES[name]
    advantages, returns = estimated(**settings)
    torch.testing.assert_close(advantages, table(rows), rtol=0, atol=1e-6)
    torch.testing.assert_close(returns, table(MONTE_CARLO), rtol=0, atol=1e-6)
