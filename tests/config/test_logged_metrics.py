"""`checkpoint.keep_best` names a metric that runs of the configuration log."""

from __future__ import annotations

import pytest

from megappo.config import load_config
from megappo.config.rules.metrics import keep_best_rules, logged_metrics
from tests.support.places import BASE

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
        ((), "reward/mean", True),
        ((), "-kl/mean", True),
        ((), "memory/rollout/peak_gigabytes", True),
        ((), "memory/NAME/peak_gigabytes", False),
        ((), "eval/reward_mean", True),
        (SETS, "eval/reward_mean", False),
        (SETS, "eval/math/reward_mean", True),
        (SETS, "eval/math/pass@2", True),
        (SETS, "eval/math/pass@4", False),
        (SETS, "eval/NAME/pass@K", False),
        ((), "episode/turns", False),
        ((), "turn/reward", False),
        (TOOLS, "episode/turns", True),
        (TOOLS, "episode/begun_anew", False),
        (TOOLS, "tool/python/calls", True),
        ((), "tool/python/calls", False),
        (GRPO, "critic/loss", False),
        (GRPO, "critic/experts_unused", False),
        (GRPO, "reward/group_spread", True),
        ((), "reward/group_spread", False),
        ((), "reward/NAME", False),
        ((), "reward/right", False),
        (TWO, "reward/right", True),
        (TWO, "reward/right/seconds", False),
        ((), "reward/clipped", False),
        (("reward.clip=[0, 1]",), "reward/clipped", True),
        (("reward.clip=[0, 1]",), "reward/given", True),
        (("reward.clip=[0, 1]",), "reward/running_mean", False),
        (MIXED, "source/sums/reward_mean", True),
        (MIXED, "source/sums/right", False),
        (MIXED, "source/others/reward_mean", False),
        ((), "group/spread", False),
        (("rollout.dynamic_sampling={}",), "group/spread", True),
        ((), "actor/penalty_coef", False),
        (("algorithm.policy_loss=penalty",), "actor/final_kl", True),
        ((), "rollout/partial", False),
        (("rollout.ahead=2",), "rollout/partial", True),
        ((), "correction/weight_mean", False),
        (("algorithm.old_logprob=corrected",), "correction/weight_mean", True),
        (("rollout.engine=transformers",), "sync/gather_seconds", False),
        (("rollout.engine=sglang",), "sync/gather_seconds", True),
        (("rollout.engine=sglang",), "sync/probe_gap", True),
        (("rollout.engine=sglang", "rollout.sglang.verify=false"), "sync/probe_gap", False),
        (("rollout.engine=transformers",), "rollout/cache_hit_rate", False),
        (("rollout.engine=transformers",), "engine/restarts", False),
        (("reference=null", "algorithm.kl_in_reward=null"), "kl/mean", False),
        (LOADED, "reward/failures", True),
        (LOADED, "eval/reward_mean", False),
        (LOADED, "sync/gigabytes_per_second", False),
        ((), "curriculum/resting", False),
        ((), "time/export", False),
        ((), "actor/experts_unused", False),
        ((), "nothing", False),
    ],
)
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
