"""The learning benchmark: runs differ only in the named settings, and the page reports the results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import CONFIGS, LAGGED, METHODS, Arm, Learned, page
from megappo.config import load_config
from tests.support.harness import start
from tests.support.places import ROOT

VERSIONS = {"device": "CPU", "commit": "abc", "python": "3", "torch": "2", "megatron-core": "0.1", "transformers": "5"}
LEARNED: list[dict[str, Any]] = [
    {"task": task, "method": method, "lag": lag, "seed": seed, "rewards": [0.1, 0.3 * seed, 0.45 * seed],
     "explained": [] if method == "grpo" else [0.0, 0.2, 0.1 * seed], "left_out": [0.0, 0.1 * seed], "seconds": 3.0}
    for task in ("sums", "tool") for method in ("clip", "dis", "grpo") for lag in (0, 1) for seed in (1, 2)
]  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lag", [0, 1])
def test_methods_differ_only_in_loss_critic_and_groups(
    path: str, method: str, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    base, config = load_config(path), load_config(path, Arm(path, method, lag, 7).overrides())
    assert config.run.seed == 7 and config.rollout.batch_sequences == base.rollout.batch_sequences
    assert config.algorithm.policy_loss == ("dis" if method == "dis" else "clip")
    assert (config.rollout.ahead, config.rollout.engine) == (
        (1, LAGGED[0].partition("=")[2]) if lag else (0, "transformers")
    )
    assert config.algorithm.old_logprob == "bypass" and config.actor.optimizer == base.actor.optimizer
    if method == "grpo":
        assert config.critic is None and config.rollout.samples_per_prompt == 8
    else:
        assert base.critic is not None
        assert config.critic == base.critic.model_copy(update={"layout": config.actor.layout})
        assert config.rollout.samples_per_prompt == 1


def test_mismatched_groups_are_rejected() -> None:
    path = str(ROOT / CONFIGS[0])
    arm = Arm(path, "grpo", 0, 1, ("rollout.prompts_per_step=399",))
    with pytest.raises(ValueError, match="has 399 samples a step, no multiple of 8; omit grpo"):
        arm.overrides()


def test_results_are_read_from_metrics() -> None:
    """Steps that train only the critic mask no tokens. The goal is a mean reward over five steps."""
    lines = [{"step": 0, "eval/reward_mean": 0.0}]
    for step in range(1, 11):
        of_actor = {
            "actor/updates": 4, "actor/masked_below": 0.1, "actor/masked_above": 0.02 * step, "actor/clipfrac": 9,
        }  # fmt: skip
        lines.append({
            "step": step, "reward/mean": 0.5 if step < 4 else 1.0, "critic/explained_variance": step / 10,
            "time/step": 2.0, **(of_actor if step > 2 else {}),
        })  # fmt: skip
    learned = Learned.of(Arm("a/task.yaml", "dis", 1, 2), lines)
    assert (learned.task, learned.method, learned.lag, learned.seed, learned.seconds) == ("task", "dis", 1, 2, 20.0)
    assert learned.left_out == pytest.approx([0.1 + 0.02 * step for step in range(3, 11)])
    assert learned.explained[-1] == 1 and learned.reward(5) == pytest.approx(0.7)
    assert learned.steps_to_goal == 7
    never = Learned.of(Arm("a/task.yaml", "clip", 1, 2), lines[:5])
    assert math.isinf(never.steps_to_goal) and never.left_out == [9, 9]


def test_learning_page_reports_the_results() -> None:
    text = page(VERSIONS, [Learned(**row) for row in LEARNED])
    assert "CPU, commit abc, Python 3, torch 2, megatron-core 0.1, transformers 5." in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## sums", "## tool"]
    rewards = "0.10 | 0.28 (0.20 to 0.35) | 0.41 (0.28 to 0.53)"
    assert f"| dis | 1 | {rewards} | not in 2 of 2 | 0.12 (0.10 to 0.13) | 7.50% | 20.0% |" in text
    assert f"| grpo | 0 | {rewards} | not in 2 of 2 |  | 7.50% | 20.0% |" in text


@pytest.mark.waits
def test_completed_runs_are_not_repeated(tmp_path: Path) -> None:
    """Failed runs are reported with the reason."""
    for arm in (Arm(path, "dis", 0, 1) for path in CONFIGS):
        numbers = {"reward/mean": 0.5, "critic/explained_variance": 0.1, "time/step": 1.0, "actor/updates": 4}
        lines = [
            {"step": step, **numbers, "actor/masked_below": 0.0, "actor/masked_above": 0.0} for step in range(1, 7)
        ]
        (tmp_path / f"{arm.name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ["benchmarks.learning", "--out", str(tmp_path), "--methods", "dis", "--lags", "0", "--seeds", "1"]
    done = start(*command)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "learning.md").read_text().strip() == done.stdout.strip()
    assert json.loads((tmp_path / "learning.json").read_text())["benchmark"] == "learning"
    done = start(*command, "--override", "rollout.prompts_per_step=0")
    assert done.returncode == 2 and "learning.py: error: " in done.stderr
