"""Tests of experience and its metrics, in a world of one process."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megappo.checkpoint.files import Marker
from megappo.checkpoint.versions import PACKAGES, recorded_versions, software_versions
from megappo.config import Config, ConfigError, derive, load_config
from megappo.config.derive import describe
from megappo.config.rules.algorithm import algorithm_rules
from megappo.config.sections.algorithm import AlgorithmSettings, KLInRewardSettings
from megappo.observe.ends import End
from megappo.ppo.assembly import start
from megappo.ppo.experience import ExperienceMaker, groups_differ_G
from megappo.ppo.reports.advice import Advisor
from megappo.ppo.reports.measures import MismatchError, check_mismatch, rollout_metrics
from megappo.preflight import template_time
from megappo.runtime.ranks.tally import Tally
from megappo.types import Rollouts, Scored
from megappo_kernels.objectives import kl_estimate
from tests.support.config import SHAPE
from tests.support.places import BASE

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("world_of_one")


def rollouts(engine_logprob_BR: Tensor, mask_BR: Tensor) -> Rollouts:
    """Return samples of one prompt. The prompt has one token."""
    B = len(mask_BR)
    lengths = mask_BR.sum(-1)
    return Rollouts(
        prompts=(), sample_ids_B=torch.arange(B), group_ids_B=torch.zeros(B, dtype=torch.int64),
        sequences=tuple(torch.zeros(int(n) + 1, dtype=torch.int64) for n in lengths), response_lengths_B=lengths,
        engine_logprob_BR=engine_logprob_BR, response_mask_BR=mask_BR, ends=(End.COMPLETE,) * B,
        weight_versions_B=torch.zeros(B, dtype=torch.int64), responses=("",) * B, raw_responses=("",) * B,
        special_tokens_B=torch.zeros(B, dtype=torch.int64),
    )  # fmt: skip


MASK = torch.tensor([[True, True, False, False], [True, True, True, True]])


def kl_step(maker: ExperienceMaker, nats_per_token: float) -> dict[str, float]:
    """Process a step of 100 samples with this KL from the reference at every token. Return the metrics."""
    logprob = torch.full(MASK.shape, -1.0)
    scored = Scored(rollouts(logprob, MASK), torch.ones(2), logprob, logprob - nats_per_token, None)
    return maker.make(scored, 100)[1]


def maker(**kl: Any) -> ExperienceMaker:
    settings = KLInRewardSettings(**{"coef": 0.1, "controller": "adaptive", "horizon": 1000, **kl})
    return ExperienceMaker(AlgorithmSettings(estimator="grpo", kl_in_reward=settings), CPU)


@pytest.mark.parametrize(
    ("kl", "nats_per_token", "factor"),
    [
        ({}, 0.011, 1 + 0.1 * 0.1),  # 0.01 per token
        ({}, 0.009, 1 - 0.1 * 0.1),
        ({"target": 0.02}, 0.02, 1.0),
        ({"per": "response"}, 2.2, 1 + 0.1 * 0.1),  # 6 per response; responses have 3 tokens on average
        ({"per": "response", "target": 0.03}, 0.01, 1.0),
    ],
)
def test_adaptive_kl_targets_nats_per_unit(kl: dict[str, Any], nats_per_token: float, factor: float) -> None:
    made = maker(**kl)
    numbers = kl_step(made, nats_per_token)
    assert numbers["kl/mean"] == pytest.approx(nats_per_token, rel=1e-4)
    assert numbers["kl/per_response"] == pytest.approx(3 * nats_per_token, rel=1e-4)
    assert numbers["kl/coef"] == 0.1, "the metric must be the coefficient of this step, not of the next step"
    assert made.kl_controller.value == pytest.approx(0.1 * factor, rel=1e-5)


@pytest.mark.parametrize(
    "values", [[1e6 + 0.25, 1e6 + 0.5], [3e7, 3e7 + 2], [-1e9, -1e9 + 64], [2.0**24 - 1, 2.0**24], [0.1, 0.1]]
)
def test_deviation_of_large_numbers_is_exact(values: list[float]) -> None:
    """The deviation of two numbers is half of their difference, even for much larger numbers."""
    tally, numbers = Tally(), torch.tensor([*values, float("nan")])
    tally.mean_and_std("x", numbers, torch.tensor([True, True, False]))
    tally.mean_and_std("none", numbers, torch.zeros(3, dtype=torch.bool))
    metrics = tally.reduce(CPU)
    first, second = numbers[:2].tolist()
    assert metrics["x/mean"] == (first + second) / 2
    assert metrics["x/std"] == abs(second - first) / 2
    assert "none/std" not in metrics and "none/mean" not in metrics


def test_adaptive_kl_on_target_keeps_its_coefficient() -> None:
    """The coefficient is 0.001, the target 0.01 nats per token and the horizon 10,000."""
    made = maker(coef=0.001, target=0.01, horizon=10_000)
    for _ in range(100):
        kl_step(made, 0.01)
    assert made.kl_controller.value == pytest.approx(0.001, rel=1e-2)


def test_advice_compares_kl_in_the_unit_of_target() -> None:
    cases: list[tuple[dict[str, Any], str]] = [({}, "kl/mean"), ({"per": "response", "target": 0.2}, "kl/per_response")]
    for kl, name in cases:
        settings = KLInRewardSettings(coef=0.1, controller="adaptive", **kl)
        for factor, expected in ((1.1, True), (0.9, False)):
            advisor, metrics = Advisor(AlgorithmSettings(kl_in_reward=settings)), {name: settings.target_nats * factor}
            assert any("above its target" in s for k in range(12) for s in advisor.observe(k, metrics)) == expected


ADAPTIVE = "{coef: 0.1, controller: adaptive%s}"


def with_kl(more: str = "") -> Config:
    return load_config(BASE, [f"algorithm.kl_in_reward={ADAPTIVE % more}"])


@pytest.mark.parametrize(
    ("more", "target", "warning"),
    [("", "towards 0.01 nats per token", ""), (", per: response", "towards 6 nats per response", ""),
     (", target: 6.0", "towards 6 nats per token", "set algorithm.kl_in_reward.per: response"),
     (", target: 0.01, per: response", "0.01 nats per response", "set algorithm.kl_in_reward.per: token"),
     (", target: 0.2", "towards 0.2 nats per token", "")],
)  # fmt: skip
def test_kl_target_of_wrong_unit_warns(more: str, target: str, warning: str) -> None:
    config = with_kl(more)
    rows = describe(config, derive(config, 1, SHAPE))
    assert target in dict(rows)["algorithm"]
    notes = [note for name, note in rows if name == "note"]
    assert [warning in note for note in notes] == ([True] if warning else [])


@pytest.mark.parametrize(
    ("more", "samples", "refused"),
    [
        (", horizon: 31", 32, True), (", horizon: 32", 32, False), ("", 10_016, True), ("", 9_984, False),
        (", controller: fixed", 10_016, False),
    ],
)  # fmt: skip
def test_horizon_below_one_step_is_rejected(more: str, samples: int, refused: bool) -> None:
    kl = f"algorithm.kl_in_reward={{coef: 0.1, controller: adaptive{more}}}".replace("adaptive, controller: ", "")
    sizes = [f"{role}.minibatch_sequences={samples}" for role in ("actor", "critic")]
    sizes += ["rollout.samples_per_prompt=8", f"rollout.prompts_per_step={samples // 8}"]
    config = load_config(BASE, [kl, *sizes])
    problems = [problem for problem in algorithm_rules(config) if "horizon" in problem]
    assert bool(problems) == refused
    assert not problems or f"must be at least the {samples} samples of a step" in problems[0]


def resumed(
    before: Config, now: Config, monkeypatch: pytest.MonkeyPatch, *, drop: bool = False,
    more: Mapping[str, Any] | None = None, versions: Mapping[str, str] | None = None,
) -> start.Start:  # fmt: skip
    """Return the start of a run with settings `now` that resumes from a checkpoint with settings `before`. With
    `drop`, the checkpoint has no unit of the KL. `more` adds contents to the checkpoint."""
    settings = json.loads(json.dumps(before.model_dump(mode="json")))
    if drop:
        del settings["algorithm"]["kl_in_reward"]["per"]
        settings["algorithm"]["kl_in_reward"]["target"] = settings["algorithm"]["kl_in_reward"]["target"] or 6.0
    of_versions = software_versions() | dict(versions or {})
    content = {"settings": settings, "steps": 10, "versions": of_versions, **(more or {})}
    chosen = Path("step"), Marker(3, {}, content), list[str]()
    monkeypatch.setattr(start, "select_checkpoint", lambda *_: chosen)
    return start.choose_start(now, derive(now, 1, SHAPE), SimpleNamespace(is_main=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "now", "expected", "is_reported"),
    [("", "", ("response", 6.0), True), (", target: 3.0", ", target: 3.0", ("response", 3.0), True),
     (", target: 3.0", ", target: 4.0", ("response", 4.0), True), ("", ", per: token", ("token", 0.01), False),
     ("", ", per: response", ("response", 6.0), False)],
)  # fmt: skip
def test_checkpoint_without_kl_unit_keeps_nats_per_response(
    before: str, now: str, expected: tuple[str, float], is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = resumed(with_kl(before), with_kl(now), monkeypatch, drop=True)
    kl = start.config.algorithm.kl_in_reward
    assert kl is not None and (kl.per, kl.target_nats) == expected
    assert any(f"remains {expected[1]:g} nats per response, as at" in s for s in start.sentences) == is_reported
    again = resumed(start.config, with_kl(now), monkeypatch)  # from a checkpoint of the resumed run
    kl = again.config.algorithm.kl_in_reward
    assert kl is not None and (kl.per, kl.target_nats) == expected
    assert not [s for s in again.sentences if "changed since then: algorithm.kl" in s]


def test_changed_function_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.py"
    config = load_config(BASE, [f"reward.function={mine}:reward"])
    changed = f"changed since then: the content of {mine}"
    for then, now, is_reported in (("a = 1", "a = 1", False), ("a = 1", "a = 2", True), (None, "a = 2", False)):
        files = {} if then is None else {"own_files": {str(mine): hashlib.sha256(then.encode()).hexdigest()}}
        mine.write_text(now)
        assert (changed in resumed(config, config, monkeypatch, more=files).sentences) == is_reported


@pytest.mark.parametrize("is_readable", [True, False])
def test_model_card_settings_of_a_finished_run(monkeypatch: pytest.MonkeyPatch, is_readable: bool) -> None:
    """The settings come from the checkpoint. If this version cannot read them, the current settings are used with a
    warning."""
    finished = load_config(BASE, ["run.steps=3"])
    settings = load_config(BASE, ["run.steps=3", "actor.optimizer.learning_rate=0.5"]).model_dump(mode="json")
    if not is_readable:
        settings["run"]["setting_of_another_version"] = 1
    start = resumed(finished, finished, monkeypatch, more={"settings": settings, "steps": 3})
    warnings = [sentence for sentence in start.sentences if sentence.startswith("a model card would contain")]
    assert start.trained is not None
    rate = start.trained.actor.optimizer.learning_rate
    assert rate == (0.5 if is_readable else finished.actor.optimizer.learning_rate)
    assert len(warnings) == (not is_readable)
    assert is_readable or "setting_of_another_version is not a setting" in warnings[0]


def test_changed_packages_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint stores the digest of all installed packages. Checkpoints of older versions have no digest, and no
    change is reported."""
    config, digest = load_config(BASE), recorded_versions()[PACKAGES]
    for changes, versions in (([], {}), ([], {PACKAGES: digest}), ([f"0123 -> {digest}"], {PACKAGES: "0123"})):
        sentences = resumed(config, config, monkeypatch, versions=versions).sentences
        assert [s for s in sentences if "packages" in s] == [f"changed since then: {PACKAGES} {s}" for s in changes]


def test_fixed_kl_resumes_without_message(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_config(BASE)
    start = resumed(plain, plain, monkeypatch, drop=True)
    assert not [s for s in start.sentences if "kl" in s.lower()]


def test_mismatch_k3_matches_kl_estimate() -> None:
    """k3 is capped at 10 for the token with a ratio of e^12."""
    engine = torch.tensor([[-12.5, -1.0, math.nan, math.nan], [-1.0, -2.0, -3.0, -1.5]])
    trainer = torch.tensor([[-0.5, -1.2, 0.0, math.inf], [-1.0, -2.0, -3.0, -1.0]])
    algorithm = AlgorithmSettings(mismatch_stop_nats=100.0)
    runtime: Any = SimpleNamespace(device=CPU)
    numbers = check_mismatch(trainer, rollouts(engine, MASK), algorithm, runtime, 0)
    gaps = torch.tensor([12.0, -0.2, 0.0, 0.0, 0.0, 0.5])
    k3 = kl_estimate(-gaps, "k3")
    assert k3[0] == 10 and numbers["mismatch/k3"] == pytest.approx(float(k3.mean()), rel=1e-6)
    assert numbers["mismatch/mean"] == pytest.approx(12.7 / 6, rel=1e-6)
    assert numbers["mismatch/max"] == pytest.approx(12.0)
    assert numbers["mismatch/truncated"] == pytest.approx(1 / 6)  # only e^12 is above the cap of 2


def test_mismatch_limit_uses_tokens_of_current_weights() -> None:
    """Only tokens of the current weights stop a run, and these tokens have their own metric. NaN always stops a run."""
    trainer = torch.tensor([[-0.5, -1.2, 0.0, 0.0], [-1.0, -2.0, -3.0, -1.0]])
    engine = trainer - torch.tensor([[9.0, 0.25, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0]])
    versions_BR = torch.tensor([[3, 7, 0, 0], [6, 7, 7, 7]])
    batch = replace(rollouts(engine, MASK), token_versions_BR=versions_BR)
    algorithm, runtime = AlgorithmSettings(mismatch_stop_nats=0.2), cast(Any, SimpleNamespace(device=CPU))
    numbers = check_mismatch(trainer, batch, algorithm, runtime, 7)
    assert numbers["mismatch/own_weights"] == pytest.approx(0.75 / 4)
    assert numbers["mismatch/mean"] == pytest.approx(9.75 / 6)
    old = check_mismatch(trainer, replace(batch, weight_versions_B=torch.tensor([6, 6])), algorithm, runtime, 8)
    assert "mismatch/own_weights" not in old
    with pytest.raises(MismatchError, match=r"differ by 0.188 nats per token"):
        check_mismatch(trainer, batch, AlgorithmSettings(mismatch_stop_nats=0.15), runtime, 7)
    engine[0, 0] = math.nan  # a token of older weights
    for newest in (7, 8):
        with pytest.raises(MismatchError, match="differ by nan nats per token"):
            check_mismatch(trainer, replace(batch, engine_logprob_BR=engine), algorithm, runtime, newest)


def test_response_of_several_versions_counts_once() -> None:
    """The number of later tokens does not matter. Padding is ignored."""
    versions_BR = torch.tensor([[7, 7, 0, 0], [6, 7, 7, 7]])
    batch = replace(rollouts(torch.zeros(MASK.shape), MASK), token_versions_BR=versions_BR)
    numbers = rollout_metrics(batch, cast(Any, SimpleNamespace(device=CPU)), 8)
    assert numbers["rollout/several_versions"] == 1 / 2
    assert numbers["rollout/lag"] == pytest.approx(7 / 6) and numbers["rollout/lag_max"] == 2


def test_failed_episodes_are_excluded_from_reward_metrics() -> None:
    """Failed episodes have the failure score, which does not measure the policy."""
    logprob, failed_B = torch.full(MASK.shape, -1.0), torch.tensor([True, False])
    episodes: Any = SimpleNamespace(failed_B=failed_B, turn_rewards_BR=torch.zeros(MASK.shape))
    batch = replace(rollouts(logprob, MASK & ~failed_B[:, None]), episodes=episodes)
    scored = Scored(batch, torch.tensor([-9.0, 1.0]), logprob, logprob - 0.1, None)
    numbers = maker().make(scored, 2)[1]
    assert numbers["kl/per_response"] == pytest.approx(0.4)
    rewards = [numbers[f"reward/{name}"] for name in ("mean", "std", "min", "max")]
    assert rewards == [1.0, 0.0, 1.0, 1.0]


def test_group_spread_metric_counts_groups() -> None:
    """Failed episodes belong to no group. Equal rewards of different prompts are no spread."""
    total_rewards_B = torch.tensor([0.0, 0.0, 1.0, 1.0, 5.0, 0.0, 0.5, 7.0])
    group_ids_B = torch.tensor([0, 0, 1, 1, -5, 2, 2, 1])
    assert groups_differ_G(total_rewards_B, group_ids_B).tolist() == [False, True, True]
    assert groups_differ_G(total_rewards_B[:4], group_ids_B[:4]).tolist() == [False, False]
    assert groups_differ_G(total_rewards_B, torch.arange(-8, 0)).tolist() == []
    numbers = kl_step(maker(), 0.1)
    assert numbers["reward/group_spread"] == 0.0 and numbers["reward/std"] == 0.0


@pytest.mark.parametrize("version", [6, 7])
def test_step_without_tokens_has_no_mismatch(version: int) -> None:
    """For example, all episodes have failed. Masked positions may contain any value."""
    nothing = torch.full(MASK.shape, math.nan)
    batch = rollouts(nothing, MASK & False)
    batch = replace(batch, response_lengths_B=torch.tensor([1, 4]), weight_versions_B=torch.tensor([version, version]))
    runtime: Any = SimpleNamespace(device=CPU)
    assert check_mismatch(nothing, batch, AlgorithmSettings(), runtime, 7) == {}


@pytest.mark.parametrize("old_logprob", ["decoupled", "corrected"])
@pytest.mark.parametrize("controller", ["adaptive", "fixed"])
def test_step_without_tokens_changes_no_state(old_logprob: Any, controller: str) -> None:
    """Means over tokens are undefined. The KL controller keeps its coefficient until the next step."""
    settings = KLInRewardSettings.model_validate({"coef": 0.1, "controller": controller, "horizon": 1000})
    made = ExperienceMaker(AlgorithmSettings(estimator="grpo", kl_in_reward=settings, old_logprob=old_logprob), CPU)
    nothing = torch.full(MASK.shape, math.nan)
    scored = Scored(rollouts(nothing, MASK & False), torch.tensor([-1.0, 3.0]), nothing, nothing, None)
    experience, numbers = made.make(scored, 100)
    assert made.kl_controller.value == 0.1
    assert all(math.isfinite(value) for value in numbers.values())
    assert numbers["reward/mean"] == 1.0 and "advantage/mean" not in numbers
    assert not experience.loss_mask_BR.any() and (experience.advantages_BR == 0).all()
    kl_step(made, 0.1)
    assert made.kl_controller.value == pytest.approx(0.1 * (1.02 if controller == "adaptive" else 1))


def with_values(returns: Tensor, values: Tensor, mask: Tensor, **algorithm: Any) -> dict[str, float]:
    """Metrics of samples with these values. With gamma 1, the rewards sum to these returns; (B, R) each."""
    nothing = torch.zeros_like(returns)
    later = torch.nn.functional.pad(returns, (0, 1))[:, 1:]
    rewards = (returns - later).masked_fill(~mask, math.nan)
    values = values.masked_fill(~mask, math.inf)
    scored = Scored(rollouts(nothing, mask), torch.zeros(len(mask)), nothing, None, values)
    return ExperienceMaker(AlgorithmSettings.model_validate(algorithm), CPU).make(scored, len(mask), rewards)[1]


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1000.0, 0.5), (-3e4, 1.0), (0.0, 1e-9)])
def test_explained_variance_of_returns_far_from_zero(mean: float, std: float) -> None:
    g = torch.Generator().manual_seed(0)
    returns = mean + std * torch.randn(5400, 1, generator=g)
    values = returns + std * torch.randn(5400, 1, generator=g) / 2
    mask = (torch.arange(5400) % 7 != 0)[:, None]
    r, v = returns[mask].double().numpy(), values[mask].double().numpy()
    truth = 1 - (r - v).var() / r.var()
    assert 0.7 < truth < 0.8
    numbers = with_values(returns, values, mask)
    assert numbers["critic/explained_variance"] == pytest.approx(truth, abs=1e-6)
    assert numbers["critic/value_mean"] == pytest.approx(v.mean(), rel=1e-6, abs=1e-9)


def test_explained_variance_of_equal_returns_is_unknown() -> None:
    values, mask = torch.randn(540, 1, generator=torch.Generator().manual_seed(0)), torch.ones(540, 1) > 0
    for value in (0.0, 3.3, 1000.1):
        assert "critic/explained_variance" not in with_values(torch.full((540, 1), value), values, mask)


@pytest.mark.parametrize("lam", [1.0, 0.5, 0.0])
def test_explained_variance_does_not_depend_on_lambda(lam: float) -> None:
    """The rewards (1, 2) and (4, 8) give the returns (3, 2) and (12, 8); the variance is 16.1875. With a smaller
    lambda, the target of the critic contains the values of the critic."""
    returns = torch.tensor([[3.0, 2.0], [12.0, 8.0]])
    values = torch.tensor([[4.0, 1.0], [8.0, 8.0]])
    numbers = with_values(returns, values, torch.ones(2, 2) > 0, lam={"actor": 0.5, "critic": lam})
    # The errors -1, 1, 4, 0 have variance 3.5.
    assert numbers["critic/explained_variance"] == pytest.approx(1 - 3.5 / 16.1875, abs=1e-9)
    assert numbers["critic/value_mean"] == 5.25


def test_no_gauge_of_the_critic_without_a_trained_token() -> None:
    """All responses are truncated, and `mask_truncated` excludes truncated responses from the losses."""
    logprob = torch.zeros(MASK.shape)
    cut = replace(rollouts(logprob, MASK), ends=(End.RESPONSE_LIMIT,) * 2)
    scored = Scored(cut, torch.ones(2), logprob, None, torch.ones(MASK.shape))
    numbers = ExperienceMaker(AlgorithmSettings(mask_truncated=True), CPU).make(scored, 2)[1]
    assert not any(name.startswith("critic/") for name in numbers) and numbers["reward/mean"] == 1.0


def timed(time: str | None) -> Config:
    return load_config(BASE, [] if time is None else [f"data.template_time='{time}'"])


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("2024-07-26 23:59:59", None, "2024-07-26 23:59:59"),
        ("2024-07-26 23:59:59", "2024-07-26 23:59:59", "2024-07-26 23:59:59"),
        (None, "2024-07-25 00:00:00", "2024-07-25 00:00:00"),
    ],
)
def test_resumed_run_keeps_its_template_time(
    before: str | None, now: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumption = resumed(timed(before), timed(now), monkeypatch)
    assert resumption.config.data.template_time == expected
    assert not any("template_time" in sentence for sentence in resumption.sentences)


def test_changed_template_time_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="data.template_time: '?2024-07-26 00:00:00'? -> "):
        resumed(timed("2024-07-26"), timed("2024-07-27"), monkeypatch)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ("run.steps=4", None),
        ("run.steps=3", "run.steps is 3, which the run has done: nothing is left to train; raise it to continue"),
        ("run.steps=2", "run.steps is 2, and the run in runs/base has done 3 already; set run.steps to 3 or more"),
    ],
)
def test_finished_run_reports_completed_steps(
    length: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is of step 3."""
    now = load_config(BASE, [length, "actor.optimizer.schedule=constant", "critic.optimizer.schedule=constant"])
    if length == "run.steps=2":
        with pytest.raises(ConfigError, match=message):
            resumed(now, now, monkeypatch)
    else:
        sentences = [s for s in resumed(now, now, monkeypatch).sentences if s.startswith("run.")]
        assert sentences == ([message] if message else [])


def test_run_keeps_its_start_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the main rank counts, which is the only rank in this test."""
    monkeypatch.setattr(template_time, "template_now", lambda: "2024-07-26 09:30:15")
    fresh = load_config(BASE, [f"run.directory={tmp_path}"])
    began = start.choose_start(fresh, derive(fresh, 1, SHAPE), SimpleNamespace(is_main=True))  # type: ignore[arg-type]
    assert began.config.data.template_time == template_time.with_template_time(fresh).data.template_time
    assert began.config.data.template_time == "2024-07-26 09:30:15"
    explicit = load_config(BASE, ["data.template_time=2020-02-02"])
    assert template_time.at_one_time(explicit).data.template_time == "2020-02-02 00:00:00"
