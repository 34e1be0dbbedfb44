"""Tests of the advice of a run: the conditions, the repetition, and the settings that the advice names."""

import math
import re
import shlex
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest

from megappo.commands.guide import section_of, text_of
from megappo.config.base import Settings
from megappo.config.schema import Config
from megappo.config.sections.algorithm import AlgorithmSettings, KLInRewardSettings
from megappo.observe.metric_docs import METRICS
from megappo.ppo.reports.advice import ADVICE, GUIDES, Advisor, advice_text, refusal

PLAIN = AlgorithmSettings()
ADAPTIVE = AlgorithmSettings(kl_in_reward=KLInRewardSettings(coef=0.1, controller="adaptive", per="response"))


def advice_of(algorithm: AlgorithmSettings, steps: list[dict[str, float]]) -> list[tuple[int, str]]:
    """Return the step and the condition of each piece of advice."""
    advisor, names = Advisor(algorithm), {advice_text(name): name for name in ADVICE}
    return [(step, names[s]) for step, metrics in enumerate(steps, start=1) for s in advisor.observe(step, metrics)]


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({"actor/clipfrac": 0.51}, "clipfrac"),
        ({"response/truncated": 0.6}, "truncated"),
        ({"response/truncated": 0.6, "response/position_limit": 0.1}, "truncated"),
        ({"response/truncated": 0.6, "response/position_limit": 0.6}, "total_limit"),
        ({"response/truncated": 0.0, "episode/limit_turn_tokens": 0.6}, "turn_cut"),
        ({"mismatch/mean": 0.051, "rollout/lag": 0.0}, "mismatch"),
        ({"mismatch/own_weights": 0.051, "rollout/lag": 0.5}, "mismatch"),
        ({"actor/skipped_updates": 1.0}, "actor_nonfinite"),
        ({"critic/skipped_updates": 1.0}, "critic_nonfinite"),
        ({"actor/grad_norm": math.nan}, "actor_nonfinite"),
        ({"critic/grad_norm": math.inf}, "critic_nonfinite"),
        ({"critic/skipped_updates": 1.0, "reward/max": 1e20, "reward/min": 0.0}, "large_reward"),
        ({"critic/grad_norm": math.nan, "reward/max": 0.0, "reward/min": -1e38}, "large_reward"),
        ({"actor/skipped_updates": 2.0, "reward/max": 2e9, "reward/min": 2e9}, "large_reward"),
        ({"critic/skipped_updates": 1.0, "reward/max": 1e3, "reward/min": 0.0}, "critic_nonfinite"),
    ],
)
def test_advice_repeats_every_twenty_steps(metrics: dict[str, float], name: str) -> None:
    assert advice_of(AlgorithmSettings(), [metrics] * 45) == [(1, name), (21, name), (41, name)]


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({"critic/explained_variance": -0.1}, "explained_variance"),
        ({"critic/explained_variance": -1.1}, "critic_overshoots"),
        ({"reward/std": 0.0}, "same_reward"),
        ({"reward/std": 3e-9, "reward/mean": 0.1}, "same_reward"),  # equal rewards with a rounding error
        ({"reward/std": 0.4, "reward/group_spread": 0.0}, "same_in_groups"),
        ({"kl/per_response": 6.1}, "kl_target"),
    ],
)
def test_advice_requires_a_lasting_condition(metrics: dict[str, float], name: str) -> None:
    assert advice_of(ADAPTIVE, [metrics] * 35) == [(10, name), (30, name)]
    good = {"critic/explained_variance": 0.1, "reward/std": 0.1, "kl/per_response": 1.0, "reward/group_spread": 0.1}
    assert advice_of(ADAPTIVE, ([metrics] * 9 + [good]) * 4) == []


def test_fixed_kl_coefficient_has_no_target() -> None:
    fixed = AlgorithmSettings(kl_in_reward=KLInRewardSettings(coef=0.1))
    assert advice_of(fixed, [{"kl/per_response": 99.0}] * 30) == []


def test_mismatch_threshold_is_a_setting() -> None:
    assert advice_of(AlgorithmSettings(mismatch_warn_nats=0.2), [{"mismatch/mean": 0.2}] * 3) == []
    assert advice_of(AlgorithmSettings(mismatch_warn_nats=0.2), [{"mismatch/mean": 0.21}]) == [(1, "mismatch")]
    assert advice_of(AlgorithmSettings(), [{"mismatch/mean": 0.9, "rollout/lag": 1.0}]) == []  # caused by later updates


def test_masking_losses_get_advice_on_masked_tokens() -> None:
    masked = {"actor/masked_below": 0.15, "actor/masked_above": 0.06, "actor/clipfrac": 0.7}
    left_out = [AlgorithmSettings(policy_loss=name) for name in ("dppo_tv", "dppo_kl")]
    for algorithm in (*left_out, AlgorithmSettings(policy_loss="dis", old_logprob="bypass")):
        assert advice_of(algorithm, [masked] * 22) == [(1, "masked"), (21, "masked")]
        assert advice_of(algorithm, [masked | {"actor/masked_above": 0.04}]) == []
    for name in ("clip", "cispo", "gspo"):  # the advice on clipping covers these losses
        assert advice_of(AlgorithmSettings(policy_loss=name), [masked]) == [(1, "clipfrac")]


def test_entropy_is_compared_with_its_early_mean() -> None:
    early = [{"actor/entropy": 2.0}] * 5
    assert advice_of(ADAPTIVE, [*early, {"actor/entropy": 0.21}]) == []
    assert advice_of(ADAPTIVE, [*early, {}, {"actor/entropy": math.nan}, {"actor/entropy": 0.19}]) == [(8, "entropy")]


def test_good_missing_or_nan_metrics_give_no_advice() -> None:
    good = {"actor/clipfrac": 0.5, "reward/std": 0.2, "response/truncated": 0.5, "actor/grad_norm": 1.0}
    unknown = {"actor/clipfrac": math.nan, "reward/std": math.nan, "critic/explained_variance": math.nan}
    assert advice_of(ADAPTIVE, [good, {}, unknown] * 20) == []


def field_type(path: str) -> Any:
    """Return the annotation of a dotted setting. Raise KeyError if the setting does not exist."""
    current: Any = Config
    for name in path.split("."):
        options = get_args(current) if get_origin(current) in (Union, UnionType) else (current,)
        section = next(o for o in options if isinstance(o, type) and issubclass(o, Settings))
        current = section.model_fields[name].annotation
    return current


@pytest.mark.parametrize("name", ADVICE)
def test_advice_is_one_sentence_with_real_settings(name: str) -> None:
    sentence = ADVICE[name]
    settings = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", sentence)
    assert settings
    for setting in settings:
        field_type(setting)
    assert sentence.endswith(".") and ". " not in sentence and "\n" not in sentence


def test_field_type_rejects_unknown_settings() -> None:
    with pytest.raises(KeyError):
        field_type("actor.optimizer.speed")


def test_large_rewards_are_reported_as_the_cause() -> None:
    for size in (1e20, 3e38, 1e10):
        large = refusal("critic", {"reward/min": -size, "reward/max": 0.0}, {}, PLAIN)
        assert "scale the rewards down" in large
    small = refusal("critic", {"reward/min": 0.0, "reward/max": 1.0}, {}, PLAIN)
    assert "Lower critic.optimizer.learning_rate, or set" in small


OWN = PLAIN.model_copy(update={"estimator": "mine.py:advantages", "policy_loss": "mine.py:loss"})
FINITE = {"reward/min": 0.0, "reward/max": 1.0, "advantage/mean": 0.0, "return/mean": 1.0}
REFUSED = {"actor/skipped_updates": 1.0, "actor/ppo_kl": 0.0}


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", ["advantage/mean", "return/mean"])
def test_custom_estimator_with_nan_is_named(role: str, name: str) -> None:
    metrics = {**FINITE, name: math.nan}
    assert "algorithm.estimator 'mine.py:advantages' returned" in refusal(role, metrics, {}, OWN)
    assert f"Lower {role}.optimizer.learning_rate" in refusal(role, metrics, {}, PLAIN)
    refused = {**metrics, **REFUSED}
    assert Advisor(OWN).observe(1, refused) == [advice_text("own_estimator")]
    assert Advisor(PLAIN).observe(1, refused) == [advice_text("actor_nonfinite")]


@pytest.mark.parametrize(("sums", "what"), [({"pg_loss": math.nan}, "values"), ({"pg_loss": 1.0}, "slopes")])
def test_custom_loss_with_nonfinite_values_is_named(sums: dict[str, float], what: str) -> None:
    sums = {**sums, "ppo_kl": 0.0}
    message = refusal("actor", FINITE, sums, OWN)
    assert f"The {what} of algorithm.policy_loss 'mine.py:loss' are not finite: correct this function, or" in message
    assert "learning_rate" in refusal("critic", FINITE, sums, OWN)
    assert "learning_rate" in refusal("actor", FINITE, sums, PLAIN)
    assert "learning_rate" in refusal("actor", FINITE, {**sums, "ppo_kl": math.nan}, OWN)
    assert Advisor(OWN).observe(1, {**FINITE, **REFUSED}) == [advice_text("own_loss")]
    assert Advisor(OWN).observe(1, {**FINITE, "critic/skipped_updates": 1.0}) == [advice_text("critic_nonfinite")]


def test_oscillating_values_count_as_overshoot() -> None:
    """Updates that are too large shift all values together. Explained variance does not show such a shift."""
    steady = {"critic/explained_variance": 0.0, "reward/std": 0.4, "return/mean": 0.7}
    swings = [{**steady, "critic/value_mean": 0.7 + 0.3 * (-1) ** step} for step in range(11)]
    assert advice_of(ADAPTIVE, swings) == [(11, "critic_overshoots")]
    small = [{**steady, "critic/value_mean": 0.7 + 0.15 * (-1) ** step} for step in range(30)]
    assert advice_of(ADAPTIVE, small) == []
    together = [{**steady, "critic/value_mean": x, "return/mean": x} for x in range(30)]
    assert advice_of(ADAPTIVE, together) == []


def test_occasional_overshoot_counts_as_slow_critic() -> None:
    metrics = [{"critic/explained_variance": -2.0}] * 5 + [{"critic/explained_variance": -0.5}] * 5
    assert advice_of(ADAPTIVE, metrics) == [(10, "explained_variance")]


@pytest.mark.parametrize("name", ADVICE)
def test_advice_links_existing_guide_sections(name: str) -> None:
    topic, heading = shlex.split(GUIDES[name])
    assert section_of(topic, heading).lower().startswith(f"## {heading}")
    assert advice_text(name).endswith(f" More: megappo guide {GUIDES[name]}")


TROUBLE = text_of("troubleshoot")
SYMPTOMS = dict(part.split("\n", 1) for part in TROUBLE.split("\n## ")[1:])


def test_troubleshooting_page_lists_all_symptoms() -> None:
    expected = {"reward is flat", "kl explodes", "critic does not learn", "entropy collapses", "lengths run away",
              "mismatch grows", "run hangs", "memory runs out", "servers restart"}  # fmt: skip
    assert expected <= {heading.lower().removeprefix("the ") for heading in SYMPTOMS}


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_symptom_rows_name_real_metrics_and_settings(symptom: str) -> None:
    """Each row begins with a metric. Every word in the form of a metric or a setting exists."""
    rows = [line.split(" | ") for line in SYMPTOMS[symptom].splitlines() if line.startswith("| `")]
    assert rows and all(len(row) == 3 and all(row) for row in rows)
    code = re.findall(r"`([^`]+)`", SYMPTOMS[symptom])
    for row in rows:
        assert re.findall(r"`([^`]+)`", row[0])[0] in METRICS
    for name in code:
        if re.fullmatch(r"[a-z]+/[A-Za-z_/@0-9]+", name):
            assert name in METRICS, name
    settings = [name.split(":")[0] for name in code if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+(: .*)?", name)]
    settings = [name for name in settings if not name.endswith(".jsonl")]
    assert settings
    for name in settings:
        field_type(name)
