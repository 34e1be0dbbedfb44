"""With everything offloaded the device has in each stage what that stage computes with, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.harness import start

CRITIC = ["critic's weights"]
"""It stays between its forward pass and its updates, which come next."""


@pytest.mark.waits
def test_only_what_a_stage_needs_is_on_the_device(tmp_path: Path) -> None:
    """At the begin of each. A probe, which the actor answers too, comes before the rollout."""
    done = start("tests.support.workers.storage_worker", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    step = [
        ["rollout", []],
        ["reward", []],
        ["forward", []],
        ["advantages", CRITIC],
        ["update_critic", CRITIC],
        ["update_actor", []],
        ["sync", []],
    ]
    assert found == [["sync", []], *step, *step, ["end", []]]
