"""A run with SGLang that is killed and resumed equals the run without interruption."""

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
def test_on_policy_run_resumes_after_kill(tmp_path: Path) -> None:
    """The run is killed during a weight sync. The weights are offloaded."""
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


def test_one_step_ahead_run_resumes_after_kill(tmp_path: Path) -> None:
    """The run is first stopped before the responses of the next step are complete. The resumed run generates the
    remaining responses with the same weights, which are older than the actor. The run is then killed during
    generation. The checkpoint contains the responses of the next step, so the resumed run trains on these responses
    although newer weights exist. The weights are offloaded."""
    settings = ("run.steps=4", "checkpoint.every_steps=1", "checkpoint.keep_last=9", "rollout.when_stopped=keep",
                "rollout.servers.count=1")  # fmt: skip
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
