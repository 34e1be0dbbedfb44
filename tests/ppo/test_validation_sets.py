"""Tests of validation sets: the estimate of pass@k, and the rejection of data settings."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megappo.algo.pass_at_k import pass_at_k
from megappo.config import ConfigError, load_config
from megappo.config.rules.metrics import keep_best_rules
from megappo.config.sections.data import DataSettings, ValidationSetSettings
from megappo.ppo.evaluation import passed_P
from tests.support.places import BASE


@given(samples=st.integers(1, 8), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_pass_at_k_equals_share_of_passing_subsets(samples: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    subsets = list(itertools.combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


@given(samples=st.integers(1, 1024), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_pass_at_k_equals_published_formula(samples: int, data: st.DataObject) -> None:
    """Compare with figure 3 of Chen et al. 2021. The product is over the numbers n - c + 1 to n."""
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    paper = 1.0
    if samples - right >= k:
        paper = 1.0 - prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))
    assert pass_at_k(samples, right, k) == pytest.approx(paper, abs=1e-12)


OF_FOUR = ValidationSetSettings(source="a.jsonl", samples=4, temperature=1.0, pass_at=(1, 2), right_above=0.5)


def test_pass_rate_is_computed_per_prompt() -> None:
    total_rewards_B = torch.tensor([0.0, 1.0, 0.5, 0.9, 0.0, 0.0, 0.5, -1.0])
    assert passed_P(total_rewards_B, OF_FOUR, 1).tolist() == [0.5, 0.0]
    assert passed_P(total_rewards_B, OF_FOUR, 2).tolist() == pytest.approx([5 / 6, 0.0], abs=1e-15)
    assert passed_P(torch.zeros(0), OF_FOUR, 1).tolist() == []  # a rank without prompts


def test_ungraded_answers_are_ignored() -> None:
    total_rewards_B = torch.tensor([0.0, 1.0, 9.0, 0.0, 9.0, 9.0, 9.0, 1.0, 9.0, 9.0, 9.0, 9.0])
    graded_B = torch.tensor([True, True, False, True, False, False, False, True, False, False, False, False])
    assert passed_P(total_rewards_B, OF_FOUR, 1, graded_B).tolist() == pytest.approx([1 / 3, 1.0])
    assert passed_P(total_rewards_B, OF_FOUR, 2, graded_B).tolist() == pytest.approx([2 / 3])
    assert passed_P(total_rewards_B, OF_FOUR, 2, ~torch.ones(12, dtype=torch.bool)).tolist() == []


def override(*overrides: str) -> Any:
    return load_config(BASE, overrides)


MIXTURE = "data.mixture={a: {source: a.jsonl, weight: 3}, b: {source: b.jsonl}}"
REFUSED = [
    (["data.train=null"], "data: none of train, mixture is given; set exactly one of these settings"),
    ([MIXTURE], "data: train and mixture are given together; set exactly one of"),
    (["data.train=null", "data.mixture={}"], "data: mixture is empty; add a name with a source"),
    (["data.train=null", "data.mixture={a/b: {source: x}}"], "mixture has 'a/b', which is not a valid name of metr"),
    (["data.train=null", "data.mixture={a: {source: x.jsonl, weight: 0}}"], "data.mixture.a.weight is 0, must be at"),
    (["data.train=null", "data.mixture={a: {sauce: x}}"], "sauce is not a setting; did you mean data.mixture.a.source"),
    (["data.train=null", "data.mixture={a: {qqq: x}}"], "the section data.mixture.a has source, options, prompt_key"),
    (["data.train.source='datasets::'"], "'datasets::' names no data set; write datasets:NAME, datasets:NAME:SPLI"),
    (["data.train.source='datasets:a:b:c:d'"], "names no data set; write datasets:NAME"),
    (["data.validation_sets={1a: {source: x}}"], "validation_sets has '1a', which is not a valid name"),
    (["data.validation_sets={a: {source: x, pass_at: [1, 4]}}"], "validation_sets.a: pass_at has 4, which needs at le"),
    (["data.validation_sets={a: {source: x, pass_at: [1, 1]}}"], "data.validation_sets.a: pass_at has 1 more than onc"),
    (["data.validation_sets={a: {source: x, samples: 4}}"], "a: samples 4 at temperature 0 are identical answers"),
    (["data.validation_sets={a: {source: x, temperature: -1}}"], "data.validation_sets.a.temperature is -1, must be"),
    (["data.validation_sets={a: {source: x, samples: 1025}}"], "data.validation_sets.a.samples is 1025, must be at mo"),
    (["data.curriculum={}"], "data.curriculum.right_above is missing; add it"),
    (["data.curriculum={right_above: 1, most_resting: 1}"], "data.curriculum.most_resting is 1, must be below 1"),
    (["data.curriculum={right_above: 1, rest_epochs: 0}"], "data.curriculum.rest_epochs is 0, must be above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_invalid_data_settings_are_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        override(*overrides)
    assert len(refused.value.problems) <= 2 and message in str(refused.value), str(refused.value)


@pytest.mark.parametrize("pass_at", [range(1, 3000), [7] * 3000, [10**9] * 2000])
def test_error_messages_stay_short(pass_at: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        ValidationSetSettings(source="x", pass_at=tuple(pass_at))
    assert len(str(refused.value.errors()[0]["ctx"]["error"])) < 150
    with pytest.raises(ValidationError) as refused:
        DataSettings.model_validate({"mixture": {"x" * 5000: {"source": "a"}}, "max_prompt_tokens": 3})
    assert len(str(refused.value.errors()[0]["ctx"]["error"])) < 250


def test_overrides_address_mapping_entries_by_name(tmp_path: Any) -> None:
    config = override("data.train=null", MIXTURE, "data.mixture.b.weight=2.5", "data.mixture.b.limit=7")
    assert config.data.mixture["b"].weight == 2.5 and config.data.sources["b"].limit == 7
    with pytest.raises(ConfigError, match=r"b\.wieght is not a setting; did you mean data\.mixture\.b\.weight"):
        override("data.train=null", MIXTURE, "data.mixture.b.wieght=2")


def test_default_validation_set_is_sampled_greedily_once() -> None:
    config = override("data.validation_sets={z: {source: z.jsonl, samples: 2, temperature: 0.5}, a: {source: a.jsonl}}")
    assert list(config.data.evaluated) == ["", "a", "z"]
    assert (config.data.evaluated[""].samples, config.data.evaluated[""].temperature) == (1, 0.0)
    assert config.data.evaluated[""].source == "validation.jsonl"


@pytest.mark.parametrize(
    ("metric", "known"),
    [
        ("eval/hard/reward_mean", True), ("eval/hard/pass@4", True), ("-source/a/response_length", True),
        ("eval/hard/pass@2", False), ("eval/NAME/reward_mean", False), ("source/c/reward_mean", False),
    ],
)  # fmt: skip
def test_keep_best_requires_an_existing_metric(metric: str, known: bool) -> None:
    config = override(
        "data.train=null", MIXTURE, f"checkpoint.keep_best={metric}",
        "data.validation_sets={hard: {source: x.jsonl, samples: 4, temperature: 1.0, pass_at: [1, 4]}}",
    )  # fmt: skip
    problems = list(keep_best_rules(config, None))
    assert problems == [] if known else f"keep_best is '{metric}', must be a metric of the run" in problems[0]
