"""Tests of offloading: each stage has only its own tensors on the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.harness import start

CRITIC = ["critic's weights"]
"""The weights stay on the device between the forward pass and the updates of the critic."""


@pytest.mark.waits
def test_device_has_only_tensors_of_current_stage(tmp_path: Path) -> None:
    """The tensors are recorded at the start of each stage. A probe by the actor precedes the rollout."""
    done = start("tests.support.workers.storage_worker", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    stages = json.loads(done.stdout)
    step = [
        ["rollout", []],
        ["reward", []],
        ["forward", []],
        ["advantages", CRITIC],
        ["update_critic", CRITIC],
        ["update_actor", []],
        ["sync", []],
    ]
    assert stages == [["sync", []], *step, *step, ["end", []]]
