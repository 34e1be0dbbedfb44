"""Runs log exactly the metrics that `logged_metrics` lists for their settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.config import load_config
from megappo.config.rules.metrics import logged_metrics
from megappo.observe.metric_docs import documented
from tests.support.harness import start

pytestmark = [pytest.mark.slow, pytest.mark.waits]

SMALL = (
    "run.steps=2", "rollout.prompts_per_step=4", "actor.minibatch_sequences=16", "critic.minibatch_sequences=16",
    "actor.layout={}", "critic.layout={}", "evaluation.every_steps=1", "checkpoint.every_steps=1",
)  # fmt: skip
GRPO = (
    "critic=null", "algorithm.estimator=grpo", "algorithm.whiten_advantages=false", "reference={}",
    "algorithm.kl_in_loss={coef: 0.01}", "rollout.dynamic_sampling={max_rounds: 2}", "algorithm.old_logprob=corrected",
    "reward.functions={one: {function: exact}, two: {function: exact}}", "reward.function=null", "reward.clip=[0, 1]",
    "reward.normalize=std",
)  # fmt: skip
EPISODES = (
    "rollout.environment={name: configs/examples/10_tools/lookup.py:Lookup, max_turns: 2, max_turn_tokens: 3}",
    "reward.function=environment", "rollout.max_response_tokens=9", "data.max_prompt_tokens=4",
    "data.train={source: 'configs/examples/10_tools/lookup.py:keys', options: {held_out: false}}",
    "data.validation=null",
    "evaluation=null", "algorithm.policy_loss=penalty", "checkpoint.huggingface_every_steps=1",
)  # fmt: skip


@pytest.mark.parametrize("overrides", [(), GRPO, EPISODES], ids=["gae", "grpo", "episodes"])
def test_runs_log_the_metrics_of_their_settings(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    arguments = [*SMALL, *overrides, f"run.directory={tmp_path / 'run'}"]
    done = start("megappo", "train", "configs/quickstart.yaml", *arguments, processes=1, timeout_seconds=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    config = load_config(tmp_path / "run" / "config.yaml")
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    logged = {name for name in last if not name.startswith("tool/")} - {"step"}
    assert all(documented(name) for name in logged)
    promised = set(logged_metrics(config, dict.fromkeys(config.trained, 0)))
    assert logged - promised == set()
    assert promised - logged <= {"mfu", "critic/explained_variance"}
    assert ("time/export" in last) == ("checkpoint.huggingface_every_steps=1" in overrides)
