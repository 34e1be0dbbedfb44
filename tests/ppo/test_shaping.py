"""What training makes of scores, beside a table that was computed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megappo.checkpoint.changes import compare_settings
from megappo.config import ConfigError, load_config
from megappo.config.rules.rollout import kept_rules
from megappo.ppo.shaping import RewardShaper
from megappo.types import Episode, Episodes, Turn
from tests.support.places import BASE
from tests.support.rewards import rollouts

GIVEN = torch.tensor([1.0, -2.0, 0.5, 4.0])
"""Of answers of 1, 2, 3 and 4 tokens; the last one is cut."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """Of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def made_of(given: torch.Tensor, **reward: Any) -> tuple[list[float], dict[str, float]]:
    scores, metrics = shaper(**reward).shape(given, rollouts("a", "b", "c", "d"))
    assert scores.dtype == torch.float32
    return scores.tolist(), metrics


def shaper(**reward: Any) -> RewardShaper:
    words = ["rollout.max_response_tokens=4", *(f"reward.{n}={json.dumps(v)}" for n, v in reward.items())]
    return RewardShaper(load_config(BASE, words), torch.device("cpu"))


@pytest.mark.usefixtures("world")
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
        (
            {"overlong": {"buffer_tokens": 2, "penalty": 2.0}, "scale": 0.5, "shift": 1.0, "clip": [-10, 1.5]},
            [1.5, 0.0, 0.75, 1.5],
            {"reward/given": 0.875, "reward/clipped": 0.25, "reward/overlong": -0.75},
        ),
    ],
)
def test_scores_are_made_in_the_order_that_is_said(
    reward: dict[str, Any], scores: list[float], metrics: dict[str, float]
) -> None:
    assert made_of(GIVEN, **reward) == (pytest.approx(scores, abs=1e-7), pytest.approx(metrics, abs=1e-7))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", ["std", "mean_std"])
def test_normalized_by_all_scores_so_far(kind: str) -> None:
    """Mean and unbiased deviation in float64 over everything until now, also after a checkpoint; then scale, clip."""
    draw = np.random.default_rng()
    made, before = shaper(normalize=kind, scale=2.0, clip=[-3, 3]), np.zeros(0)
    for count in (3, 1, 40, 7):
        given = (1e4 + 3 * draw.standard_normal(count)).astype(np.float32)
        before = np.concatenate([before, given.astype(np.float64)])
        scores, metrics = made.shape(torch.from_numpy(given), rollouts(*"a" * count))
        mean, std = before.mean(), before.std(ddof=1)
        wanted = np.clip(2 * (given - (mean if kind == "mean_std" else 0.0)) / std, -3, 3)
        np.testing.assert_allclose(scores.numpy(), wanted, rtol=5e-6, atol=1e-5)
        assert metrics["reward/running_mean"] == pytest.approx(mean, rel=1e-12)
        assert metrics["reward/running_std"] == pytest.approx(std, rel=1e-6)
        state = json.loads(json.dumps(made.state_dict()))
        made = shaper(normalize=kind, scale=2.0, clip=[-3, 3])
        made.load_state_dict(state)


@pytest.mark.usefixtures("world")
def test_failed_episodes_do_not_count() -> None:
    """Metrics and the running standard deviation use only the samples that are trained on."""
    fine, failed = Episode((Turn(0, 1),)), Episode((), failure="hung")
    episodes = Episodes((fine, failed, fine, failed), torch.zeros(4, 4), ((),) * 4)
    given = replace(rollouts("a", "b", "c", "d"), episodes=episodes)
    made, scores = shaper(normalize="std", clip=[-9, 2]), torch.tensor([1.0, -50.0, 3.0, 50.0])
    metrics = made.shape(scores, given)[1]
    expected = {"given": 2.0, "clipped": 0.5, "running_mean": 2.0, "running_std": 2**0.5}
    assert metrics == {f"reward/{name}": pytest.approx(value) for name, value in expected.items()}


@pytest.mark.usefixtures("world")
def test_equal_scores_are_not_divided() -> None:
    assert made_of(torch.full((4,), 3.0), normalize="std")[0] == [3.0] * 4
    assert made_of(torch.full((4,), 3.0), normalize="mean_std")[0] == [0.0] * 4


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("reward.clip=[1, 1]", "clip is [1.0, 1.0], must be a lower and an upper bound"),
        ("reward.clip=[.nan, 1]", "reward.clip.0 is nan, must be a finite number"),
        ("reward.clip=3", "reward.clip is 3"),
        ("reward.normalize=running", "reward.normalize is 'running', must be std or mean_std"),
        ("reward.scale=0", "reward.scale is 0, must be above 0"),
        ("reward.truncated_penalty=-1", "reward.truncated_penalty is -1, must be at least 0"),
    ],
)
def test_what_is_no_bound_is_refused(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_config(BASE, [setting])
    assert sentence in str(told.value)


def test_an_environment_scales_its_own_rewards() -> None:
    environment = "rollout.environment={name: guess}"
    problems = list(kept_rules(load_config(BASE, [environment, "reward.scale=2"])))
    assert any("reward.normalize, scale, shift and clip apply to the scores of" in problem for problem in problems)
    assert not list(kept_rules(load_config(BASE, [environment, "reward.truncated_penalty=1"])))


@pytest.mark.parametrize("name", ["truncated_score", "truncated_penalty", "scale", "shift"])
def test_another_reward_is_another_run(name: str) -> None:
    before, now = (load_config(BASE, [f"reward.{name}={value}"]).model_dump(mode="json") for value in (1.0, 2.0))
    assert compare_settings(before, now, (1, 1)).dangerous == (f"reward.{name}: 1.0 -> 2.0",)
