"""Tests of reward shaping against values that were computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megappo.checkpoint.changes import compare_settings
from megappo.config import ConfigError, load_config
from megappo.config.rules.rollout import sampling_rules
from megappo.ppo.shaping import RewardShaper
from megappo.types import Episode, Episodes, Turn
from tests.support.places import BASE
from tests.support.rewards import rollouts

SCORES = torch.tensor([1.0, -2.0, 0.5, 4.0])
"""Scores of responses with 1, 2, 3 and 4 tokens. The last response is truncated."""


def shaped(raw_scores: torch.Tensor, **reward: Any) -> tuple[list[float], dict[str, float]]:
    scores, metrics = shaper(**reward).shape(raw_scores, rollouts("a", "b", "c", "d"))
    assert scores.dtype == torch.float32
    return scores.tolist(), metrics


def shaper(**reward: Any) -> RewardShaper:
    overrides = ["rollout.max_response_tokens=4", *(f"reward.{n}={json.dumps(v)}" for n, v in reward.items())]
    return RewardShaper(load_config(BASE, overrides), torch.device("cpu"))


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("reward", "scores", "metrics"),
    [
        ({}, [1.0, -2.0, 0.5, 4.0], {}),
        ({"truncated_score": -1}, [1.0, -2.0, 0.5, -1.0], {"reward/given": 0.875}),
        ({"truncated_penalty": 1.5}, [1.0, -2.0, 0.5, 2.5], {"reward/given": 0.875}),
        ({"truncated_score": 0, "truncated_penalty": 0.5}, [1.0, -2.0, 0.5, -0.5], {"reward/given": 0.875}),
        ({"scale": 2, "shift": -1}, [1.0, -5.0, 0.0, 7.0], {"reward/given": 0.875}),
        ({"clip": [-1, 3]}, [1.0, -1.0, 0.5, 3.0], {"reward/given": 0.875, "reward/clipped": 0.5}),
        ({"scale": 2, "clip": [-4, 8]}, [2.0, -4.0, 1.0, 8.0], {"reward/given": 0.875, "reward/clipped": 0.0}),
        ({"overlong": {"buffer_tokens": 2, "penalty": 2.0}, "scale": 0.5, "shift": 1.0, "clip": [-10, 1.5]},
         [1.5, 0.0, 0.75, 1.5], {"reward/given": 0.875, "reward/clipped": 0.25, "reward/overlong": -0.75}),
    ],
)  # fmt: skip
def test_shaping_steps_run_in_documented_order(
    reward: dict[str, Any], scores: list[float], metrics: dict[str, float]
) -> None:
    assert shaped(SCORES, **reward) == (pytest.approx(scores, abs=1e-7), pytest.approx(metrics, abs=1e-7))


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("kind", ["std", "mean_std"])
def test_normalization_uses_all_scores_so_far(kind: str) -> None:
    """Mean and unbiased deviation are float64 statistics of all scores so far, also after a checkpoint. Scale and clip
    come afterwards."""
    draw = np.random.default_rng()
    made, before = shaper(normalize=kind, scale=2.0, clip=[-3, 3]), np.zeros(0)
    for count in (3, 1, 40, 7):
        raw_scores = (1e4 + 3 * draw.standard_normal(count)).astype(np.float32)
        before = np.concatenate([before, raw_scores.astype(np.float64)])
        scores, metrics = made.shape(torch.from_numpy(raw_scores), rollouts(*"a" * count))
        mean, std = before.mean(), before.std(ddof=1)
        expected = np.clip(2 * (raw_scores - (mean if kind == "mean_std" else 0.0)) / std, -3, 3)
        np.testing.assert_allclose(scores.numpy(), expected, rtol=5e-6, atol=1e-5)
        assert metrics["reward/running_mean"] == pytest.approx(mean, rel=1e-12)
        assert metrics["reward/running_std"] == pytest.approx(std, rel=1e-6)
        state = json.loads(json.dumps(made.state_dict()))
        made = shaper(normalize=kind, scale=2.0, clip=[-3, 3])
        made.load_state_dict(state)


@pytest.mark.usefixtures("world_of_one")
def test_failed_episodes_are_excluded_from_statistics() -> None:
    """Metrics and the running standard deviation use only the samples that are trained on."""
    fine, failed = Episode((Turn(0, 1),)), Episode((), failure="hung")
    episodes = Episodes((fine, failed, fine, failed), torch.zeros(4, 4), ((),) * 4)
    batch = replace(rollouts("a", "b", "c", "d"), episodes=episodes)
    made, scores = shaper(normalize="std", clip=[-9, 2]), torch.tensor([1.0, -50.0, 3.0, 50.0])
    metrics = made.shape(scores, batch)[1]
    expected = {"given": 2.0, "clipped": 0.5, "running_mean": 2.0, "running_std": 2**0.5}
    assert metrics == {f"reward/{name}": pytest.approx(value) for name, value in expected.items()}


@pytest.mark.usefixtures("world_of_one")
def test_equal_scores_are_not_scaled_by_deviation() -> None:
    assert shaped(torch.full((4,), 3.0), normalize="std")[0] == [3.0] * 4
    assert shaped(torch.full((4,), 3.0), normalize="mean_std")[0] == [0.0] * 4


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [("reward.clip=[1, 1]", "clip is [1.0, 1.0], must be a lower and an upper bound"),
     ("reward.clip=[.nan, 1]", "reward.clip.0 is nan, must be a finite number"), ("reward.clip=3", "reward.clip is 3"),
     ("reward.normalize=running", "reward.normalize is 'running', must be std or mean_std"),
     ("reward.scale=0", "reward.scale is 0, must be above 0"),
     ("reward.truncated_penalty=-1", "reward.truncated_penalty is -1, must be at least 0")],
)  # fmt: skip
def test_invalid_shaping_settings_are_rejected(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(BASE, [setting])
    assert sentence in str(error.value)


def test_shaping_of_environment_rewards_is_rejected() -> None:
    environment = "rollout.environment={name: guess}"
    problems = list(sampling_rules(load_config(BASE, [environment, "reward.scale=2"])))
    assert any("reward.normalize, scale, shift and clip apply to the scores of" in problem for problem in problems)
    assert not list(sampling_rules(load_config(BASE, [environment, "reward.truncated_penalty=1"])))


@pytest.mark.parametrize("name", ["truncated_score", "truncated_penalty", "scale", "shift"])
def test_changed_shaping_is_a_dangerous_change(name: str) -> None:
    before, now = (load_config(BASE, [f"reward.{name}={value}"]).model_dump(mode="json") for value in (1.0, 2.0))
    assert compare_settings(before, now, (1, 1)).dangerous == (f"reward.{name}: 1.0 -> 2.0",)
