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


def test_on_policy(tmp_path: Path) -> None:
    """Killed while the servers generate, and while they are given weights."""
    settings = ("run.steps=3", "checkpoint.every_steps=1")
    sglang = {"config": "sglang_quickstart"}
    killed = tmp_path / "killed"
    attempts(
        tmp_path,
        train(tmp_path / "whole", *settings, **sglang),
        killed_at(killed, 2, "sync", 0, *settings, **sglang),
        train(killed, *settings, **sglang),
        timeout=400,
    )
    assert_same_run(tmp_path / "whole", killed, 3)


def test_one_step_ahead(tmp_path: Path) -> None:
    """What was generated ahead is in the checkpoint, so it is trained on although newer weights are there."""
    settings = ("run.steps=4", "checkpoint.every_steps=1")
    sglang = {"config": "sglang_disaggregated"}
    killed = tmp_path / "killed"
    attempts(
        tmp_path,
        train(tmp_path / "whole", *settings, **sglang),
        killed_at(killed, 3, "update_actor", 1, *settings, **sglang),
        train(killed, *settings, **sglang),
        timeout=400,
    )
    assert (tmp_path / "whole/checkpoints/step-000003/responses-00001.pt").exists()
    assert_same_run(tmp_path / "whole", killed, 4)
