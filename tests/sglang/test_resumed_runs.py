"""A run through SGLang that is killed and started again is the run that was not killed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.attempts import assert_same_run, attempts, killed_at, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment"),
]
OFFLOAD = ("actor.offload=true", "critic.offload=true")


@pytest.mark.exhaustive
def test_on_policy_killed_and_continued(tmp_path: Path) -> None:
    """While the servers are given weights, which rest outside of the device."""
    settings = ("run.steps=3", "checkpoint.every_steps=1")
    killed = tmp_path / "killed"
    attempts(
        tmp_path,
        train(tmp_path / "whole", *settings, config="sglang_quickstart"),
        killed_at(killed, 2, "sync", 0, *settings, *OFFLOAD, config="sglang_quickstart"),
        train(killed, *settings, *OFFLOAD, config="sglang_quickstart"),
        timeout=400,
    )
    assert not (tmp_path / "whole/checkpoints/step-000002/responses-00001.pt").exists()
    assert_same_run(tmp_path / "whole", killed, 3)


def test_one_step_ahead_stopped_killed_and_continued(tmp_path: Path) -> None:
    """Stopped while the servers owe the next step's responses: what is left of them is generated with the weights that
    were due, which are older than the actor's. Then killed while they generate: what was generated ahead is in the
    checkpoint, so it is trained on although newer weights are there. Weights rest meanwhile."""
    settings = ("run.steps=4", "checkpoint.every_steps=1", "checkpoint.keep_last=9", "rollout.when_stopped=keep",
                "rollout.sglang.engines=1")  # fmt: skip
    config, run = "sglang_disaggregated", tmp_path / "killed"
    stop = {"rank": 1, "step": 2, "at": "update_critic", "signal": "SIGUSR1", "stall": "rollout", "after_answers": True}
    output = attempts(
        tmp_path,
        train(tmp_path / "whole", *settings, config=config),
        train(run, *settings, *OFFLOAD, config=config, expect="85", kill=stop),
        killed_at(run, 4, "update_actor", 1, *settings, *OFFLOAD, config=config),
        train(run, *settings, *OFFLOAD, config=config),
        timeout=500,
    )
    assert "stopped after step 2 with a checkpoint" in output and "Traceback" not in output
    stopped = run / "checkpoints/step-000002"
    assert (stopped / "engine-weights-00000.pt").exists() and (stopped / "responses-00000.pt").exists()
    assert (tmp_path / "whole/checkpoints/step-000003/responses-00001.pt").exists()
    assert_same_run(tmp_path / "whole", run, 4)
