"""A run through SGLang that is killed and started again is the run that was not killed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from distributed.attempts import assert_same_run, attempts, killed_at, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs launch/requirements-sglang.txt"),
]


@pytest.mark.parametrize(
    ("config", "steps", "step", "at", "rank"),
    [
        pytest.param("sglang_quickstart", 3, 2, "sync", 0, id="on-policy"),
        pytest.param("sglang_disaggregated", 4, 3, "update_actor", 1, id="one-step-ahead"),
    ],
)
def test_killed_and_continued(tmp_path: Path, config: str, steps: int, step: int, at: str, rank: int) -> None:
    """On policy while the servers are given weights; one step ahead while they generate. What was generated ahead is in
    the checkpoint, so it is trained on although newer weights are there."""
    settings = (f"run.steps={steps}", "checkpoint.every_steps=1")
    killed = tmp_path / "killed"
    attempts(
        tmp_path,
        train(tmp_path / "whole", *settings, config=config),
        killed_at(killed, step, at, rank, *settings, config=config),
        train(killed, *settings, config=config),
        timeout=400,
    )
    kept = tmp_path / f"whole/checkpoints/step-{steps - 1:06d}/responses-00001.pt"
    assert kept.exists() == (config == "sglang_disaggregated")
    assert_same_run(tmp_path / "whole", killed, steps)
