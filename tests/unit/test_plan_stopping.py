"""How long a run takes to stop, and how often it writes checkpoints, by the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.config import load_config
from megappo.plan import ASSUMED, MACHINES, Plan, make_plan, read_models

ROOT = Path(__file__).parents[2]
MIDDLE = ROOT / "configs" / "qwen3_8b_8gpu_math.yaml"
WEIGHTS = 8_190_735_360
"""Of Qwen3-8B."""


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def plan(*overrides: str, gpus: int = 8) -> Plan:
    config = load_config(MIDDLE, overrides)
    return make_plan(config, read_models(config, ROOT / "configs" / "models").models, MACHINES["h100"], gpus)


def seconds(found: Plan, *stages: str) -> float:
    return sum(stage.seconds for stage in found.stages if stage.name in stages)


def test_the_lead_covers_what_is_not_interrupted_and_two_checkpoints() -> None:
    found = plan()
    stopping = found.stopping
    assert stopping.uninterruptible_seconds == pytest.approx(seconds(found, "update_critic", "update_actor", "sync"))
    assert stopping.checkpoint_bytes == 2 * 14 * WEIGHTS  # actor and critic: bfloat16 weights, 12 bytes of optimizer
    assert stopping.checkpoint_seconds == stopping.checkpoint_bytes / ASSUMED.checkpoint_bytes_per_second
    assert stopping.lead_seconds >= 60 + stopping.uninterruptible_seconds + 2 * stopping.checkpoint_seconds
    assert stopping.lead_seconds % 60 == 0


def test_more_to_finish_takes_longer_to_stop() -> None:
    base = plan().stopping.lead_seconds
    assert plan("actor.epochs=4", "critic.epochs=4").stopping.lead_seconds > base
    assert plan(gpus=32).stopping.lead_seconds < base  # more nodes write, and updates are shorter
    longer = plan("rollout.prompts_per_step=512", "rollout.sglang.max_inflight_sequences=8")
    assert longer.stopping.lead_seconds == base  # generation is interrupted


def test_checkpoints_follow_the_time_of_a_step() -> None:
    for overrides in ((), ("rollout.sglang.max_inflight_sequences=1",), ("rollout.prompts_per_step=128",)):
        found = plan(*overrides)
        lost = found.stopping.every_steps * found.step_seconds
        assert lost <= 1800 or found.stopping.every_steps == 1
        assert lost >= found.stopping.checkpoint_seconds


def test_what_a_plan_says_of_stopping(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(MIDDLE), "--machine", "h100", "--gpus", "8"]
    assert main([*words, "--json"]) == 0
    stopping = json.loads(capsys.readouterr().out)["plan"]["stopping"]
    lead, every, lost = stopping["lead_seconds"], stopping["every_steps"], stopping["lost_seconds"]
    assert 0 < lost <= 1800
    for override, said in (
        ([], f"every {every} steps loses at most {lost / 60:.2g} minutes"),
        (
            ["checkpoint.every_steps=200"],
            f"every 200 steps: checkpoint.every_steps={every} would suit the time of a step",
        ),
        (["checkpoint=null"], "checkpoint is null, and a run that ends early is lost"),
    ):
        assert main([*words, *override]) == 0
        out = capsys.readouterr().out
        assert f"stopping takes up to {lead} seconds: sbatch --signal=USR1@{lead}; " in out and said in out


def test_a_step_that_is_longer_than_half_an_hour_is_lost_whole() -> None:
    overrides = ("rollout.sglang.max_inflight_sequences=1", "rollout.prompts_per_step=4096", "checkpoint.every_steps=1")
    found = plan(*overrides)
    minutes = found.step_seconds / 60
    assert minutes > 30
    said = found.stopping.sentence(load_config(MIDDLE, overrides))
    assert said.endswith(f" every step loses at most {minutes:.2g} minutes")
