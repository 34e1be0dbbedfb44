"""Defaults of settings, explicit settings that do not change, and the logged metrics that a setting names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megappo.config import Config, ConfigError, derive_run, load_config
from megappo.config.derive import describe
from megappo.config.rules.metrics import keep_best_rules, logged_metrics
from megappo.config.schema import RewardSettings
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.config.sections.environment import ToolSettings
from megappo.observe.metrics import read_metrics
from megappo.plan.hardware.machines import MACHINES
from megappo.plan.inputs import make_setup
from megappo.plan.planner import make_plan, read_models
from megappo.rewards.processes.workers import worker_count
from tests.support.configurations import write_short
from tests.support.harness import succeed
from tests.support.places import BASE, TINY


@pytest.fixture
def short(tmp_path: Path) -> Path:
    return write_short(tmp_path)


def rates(config: Config) -> list[float]:
    return [role.optimizer.learning_rate for role in config.trained.values()]


def test_defaults_of_a_short_file(short: Path) -> None:
    config = load_config(short)
    assert config.run.path == Path("runs/first_try") and rates(config) == [1e-6, 5e-6]
    assert config.max_sequence_tokens == 2048 and config.rollout.batch_sequences == 256
    derived = derive_run(config, 8)
    assert derived.critic is not None
    assert [role.updates_per_step for role in (derived.actor, derived.critic)] == [4, 4]
    assert config.actor.minibatch_sizes(256) == [64] * 4 and config.actor.minibatch_sizes(3) == [1, 1, 1]


@pytest.mark.parametrize(
    ("machine", "ranks", "engine"), [("h100", 8, "sglang"), ("h100", 1, "sglang"), ("cpu", 1, "transformers")]
)
def test_plan_of_a_short_file_fits(short: Path, machine: str, ranks: int, engine: str) -> None:
    """The engine is the default engine of the machine."""
    config = load_config(short, [f"rollout.engine={engine}"])
    plan = make_plan(config, read_models(config, None).models, MACHINES[machine], ranks)
    assert plan.fits, plan.verdict


def test_explicit_settings_do_not_change(short: Path) -> None:
    overrides = [
        "run.name=own", "actor.optimizer={schedule: linear, learning_rate: 3e-7}", "critic.optimizer.schedule=cosine",
        "actor.minibatch_sequences=128", "critic.minibatches=1", "rollout.prompts_per_step=128",
    ]  # fmt: skip
    config = load_config(short, overrides)
    assert config.run.name == "own" and rates(config) == [3e-7, 5e-6]
    assert config.critic is not None
    sizes = [role.minibatch_sizes(config.rollout.batch_sequences) for role in config.trained.values()]
    assert sizes == [[128], [128]]
    with pytest.raises(ConfigError, match="'gae' needs a critic; add the section critic"):
        derive_run(load_config(short, ["critic=null"]), 1)
    alone = load_config(short, ["algorithm.estimator=grpo", "rollout.samples_per_prompt=4"])
    assert alone.critic is None
    derive_run(alone, 1)


@pytest.mark.parametrize(
    ("ranks", "overrides", "shards_sequences", "shards_state"),
    [
        (1, [], False, False), (2, [], False, True), (2, ["layout.tensor_parallel=2"], True, False),
        (4, ["layout.tensor_parallel=2"], True, True), (2, ["layout.context_parallel=2"], False, True),
        (2, ["layout.pipeline_parallel=2"], False, False),
        (4, ["layout={tensor_parallel: 2, sequence_parallel: false}", "optimizer.distributed=false"], False, False),
        (1, ["optimizer.distributed=true"], False, True),
    ],
)  # fmt: skip
def test_ranks_with_the_same_state_shard_it(
    short: Path, ranks: int, overrides: list[str], shards_sequences: bool, shards_state: bool
) -> None:
    """Tensor parallel ranks shard the activations between their regions. Replicas and context parallel ranks shard the
    state of the optimizer. The plan and the table before a run report both."""
    config = load_config(short, [f"{role}.{word}" for role in ("actor", "critic") for word in overrides])
    derived = derive_run(config, ranks)
    rows = dict(describe(config, derived))
    setup = make_setup(config, read_models(config, None).models, ranks, on_cuda=True)
    for name, role in (("actor", setup.actor), ("critic", setup.critic)):
        assert role is not None
        assert (role.sequence_parallel, role.distributed_optimizer) == (shards_sequences, shards_state)
        assert (role.gathers_in_forward, "sequence parallel" in rows[name]) == (shards_state, shards_sequences)
        assert ("distributed optimizer" in rows[name]) == shards_state


def test_default_microbatch_has_room_for_the_longest_sample(short: Path) -> None:
    """An explicit budget without room for the longest sample is refused."""
    long = "rollout.max_response_tokens=16000"
    config = load_config(short, [long])
    assert [role.microbatch_budget_tokens for role in config.trained.values()] == [17408, 17408]
    derive_run(config, 4)
    for overrides in (["actor.layout={tensor_parallel: 2, context_parallel: 2}"], ["critic={}"]):
        derive_run(load_config(short, [long, *overrides]), 4)
    assert load_config(short).actor.microbatch_budget_tokens == 8192
    with pytest.raises(ConfigError, match=r"critic.microbatch_budget_tokens 8192 is below the longest sample"):
        derive_run(load_config(short, [long, "critic.microbatch_budget_tokens=8192"]), 4)
    for wrong in ("rollout.max_response_tokens=long", "data={}", "actor=3", "critic=[]"):
        with pytest.raises(ConfigError):
            load_config(short, [wrong])


@pytest.mark.parametrize(
    ("cores", "ranks", "settings", "workers"),
    [
        (2, 1, {}, 1), (2, 2, {}, 1), (16, 1, {}, 8), (16, 4, {}, 2), (192, 8, {}, 8), (1, 1, {}, 1),
        (192, 8, {"batch": True}, 1), (2, 2, {"workers": 5}, 5),
    ],
)  # fmt: skip
def test_reward_workers_follow_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, settings: dict[str, object], workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(cores)))
    reward = RewardSettings.model_validate({"function": "exact", **settings})
    launched = {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    assert worker_count(reward, launched if ranks > 1 else {}) == workers


@pytest.mark.slow
@pytest.mark.waits
def test_short_file_trains(short: Path) -> None:
    """The tokenizer of the tiny model has no chat template, and the model has a short context."""
    write_short(short.parent, f"{TINY}, init: random")
    overrides = ["data.apply_chat_template=false", "data.max_prompt_tokens=8", "rollout.max_response_tokens=3"]
    succeed("megappo", "train", short, f"run.directory={short.parent / 'run'}", *overrides, processes=1)
    lines = read_metrics(short.parent / "run" / "metrics.jsonl")[-2:]
    assert [(line["step"], line["actor/updates"], line["critic/updates"]) for line in lines] == [(1, 4, 4), (2, 4, 4)]


@pytest.mark.parametrize(
    ("loss", "band", "settings"),
    [
        ("cispo", None, {"band.low": 1.0, "band.high": 4.0}),
        ("cispo", {"low": 0.25}, {"band.low": 0.25, "band.high": 4.0}),
        ("cispo", {"high": 2.5}, {"band.low": 1.0, "band.high": 2.5}),
        ("gspo", {"low": 0.25, "high": 2.5}, {"band.low": 0.25, "band.high": 2.5}),
        ("clip", None, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        ("sapo", None, {}),
        ("file.py:loss", None, {}),
    ],
)  # fmt: skip
def test_missing_edge_of_the_band_is_the_loss_default(
    loss: str, band: dict[str, float] | None, settings: dict[str, float]
) -> None:
    assert AlgorithmSettings.model_validate({"policy_loss": loss, "band": band}).loss_settings == settings


def test_model_programs_are_confined_by_default() -> None:
    assert ToolSettings().confined and ToolSettings(workers=1).confined and not ToolSettings(confined=False).confined


GRPO = ("critic=null", "algorithm.estimator=grpo")
SETS = (
    "data.validation=null",
    "data.validation_sets={math: {source: m.jsonl, samples: 4, temperature: 1.0, pass_at: [2]}}",
)
TOOLS = ("rollout.environment={name: tools}",)
TWO = ("reward.functions={right: {function: exact}, short: {function: exact}}", "reward.function=null")
MIXED = ("data.train=null", "data.mixture={sums: {source: a.jsonl}, talk: {source: b.jsonl}}")
BYPASS = ("algorithm.old_logprob=bypass",)
LOADED = ("rollout.load_from=nowhere", "evaluation=null")


@pytest.mark.parametrize(
    ("overrides", "metric", "logs"),
    [
        ((), "reward/mean", True), ((), "-kl/mean", True), ((), "memory/rollout/peak_gigabytes", True),
        ((), "memory/NAME/peak_gigabytes", False), ((), "eval/reward_mean", True), (SETS, "eval/reward_mean", False),
        (SETS, "eval/math/reward_mean", True), (SETS, "eval/math/pass@2", True), (SETS, "eval/math/pass@4", False),
        (SETS, "eval/NAME/pass@K", False), ((), "episode/turns", False), ((), "turn/reward", False),
        (TOOLS, "episode/turns", True), (TOOLS, "episode/begun_anew", False), (TOOLS, "tool/python/calls", True),
        ((), "tool/python/calls", False), (GRPO, "critic/loss", False), (GRPO, "critic/experts_unused", False),
        (GRPO, "reward/group_spread", True), ((), "reward/group_spread", False), ((), "reward/NAME", False),
        ((), "reward/right", False), (TWO, "reward/right", True), (TWO, "reward/right/seconds", False),
        ((), "reward/clipped", False), (("reward.clip=[0, 1]",), "reward/clipped", True),
        (("reward.clip=[0, 1]",), "reward/given", True), (("reward.clip=[0, 1]",), "reward/running_mean", False),
        (MIXED, "source/sums/reward_mean", True), (MIXED, "source/sums/right", False),
        (MIXED, "source/others/reward_mean", False), ((), "group/spread", False),
        (("rollout.dynamic_sampling={}",), "group/spread", True), ((), "actor/penalty_coef", False),
        (("algorithm.policy_loss=penalty",), "actor/final_kl", True), ((), "rollout/partial", False),
        (("rollout.ahead=2",), "rollout/partial", True), ((), "correction/weight_mean", False),
        (("algorithm.old_logprob=corrected",), "correction/weight_mean", True),
        (("rollout.engine=transformers",), "sync/gather_seconds", False),
        (("rollout.servers.kind=sglang",), "sync/gather_seconds", True),
        (("rollout.servers.kind=sglang",), "sync/probe_gap", True),
        (("rollout.servers.kind=sglang", "rollout.servers.verify=false"), "sync/probe_gap", False),
        (("rollout.engine=transformers",), "rollout/cache_hit_rate", False),
        (("rollout.engine=transformers",), "engine/restarts", False),
        (("reference=null", "algorithm.kl_in_reward=null"), "kl/mean", False), (LOADED, "reward/failures", True),
        (LOADED, "eval/reward_mean", False), (LOADED, "sync/gigabytes_per_second", False),
        ((), "curriculum/resting", False), ((), "time/export", False), ((), "actor/experts_unused", False),
        ((), "nothing", False),
    ],
)  # fmt: skip
def test_metric_is_logged_with_the_settings(overrides: tuple[str, ...], metric: str, logs: bool) -> None:
    config = load_config(BASE, [*overrides, f"checkpoint.keep_best={metric}"])
    problems = list(keep_best_rules(config, None, {"actor": 0, "critic": 0}))
    assert (problems == []) == logs, problems
    if not logs:
        assert f"checkpoint.keep_best is '{metric}'" in problems[0]
        named = problems[0].rpartition("the nearest are ")[2].replace("'", "").split(", ")
        assert len(named) == 3 and set(named) <= set(logged_metrics(config, {"actor": 0, "critic": 0}))


def test_error_names_the_required_setting() -> None:
    config = load_config(BASE, ["checkpoint.keep_best=episode/turns"])
    (problem,) = keep_best_rules(config, None)
    assert "is logged only with rollout.environment; change the settings, or choose a different metric; the" in problem


@pytest.mark.parametrize(
    ("overrides", "metric", "logs"),
    [
        ((*BYPASS, "algorithm.mismatch_every_steps=4", "checkpoint.every_steps=2"), "mismatch/mean", False),
        ((*BYPASS, "algorithm.mismatch_every_steps=4", "checkpoint.every_steps=5"), "mismatch/mean", True),
        (("critic.warmup_steps=10",), "actor/loss", False),
        (("critic.warmup_steps=9",), "actor/loss", True),
        (("checkpoint.every_steps=3",), "time/checkpoint", True),  # step 10 also has a checkpoint
        (("checkpoint.every_steps=4",), "time/checkpoint", False),
        (("checkpoint.huggingface_every_steps=9",), "time/export", True),
        (("checkpoint.huggingface_every_steps=4",), "time/export", False),
    ],
)
def test_steps_with_checkpoints_log_the_metric(overrides: tuple[str, ...], metric: str, logs: bool) -> None:
    config = load_config(BASE, ["checkpoint.every_steps=10", *overrides, f"checkpoint.keep_best={metric}"])
    problems = list(keep_best_rules(config, 10))
    assert (problems == []) == logs
    assert logs or "which no step with a checkpoint logs (run.steps 10, checkpoint.every_steps" in problems[0]
