"""The overhead per sample outside of generation and models is small and does not grow with the step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.step import outside_share
from tests.support.harness import start

FLAT = 1.5
"""Largest ratio of the CPU time per sample with 4,096 samples to the CPU time per sample with 64 samples. The measured
ratio is 0.26, because more samples share the constant cost. With quadratic cost the ratio would be up to 64."""
MOST_MILLISECONDS = 3.0
"""Largest CPU time per sample in milliseconds. Measured: 0.47 with 64 samples and 0.12 with 4,096 samples."""


@pytest.mark.waits
@pytest.mark.slow
def test_cost_per_sample_is_flat_and_small(tmp_path: Path) -> None:
    saved = tmp_path / "overhead.json"
    command = ["benchmarks.overhead", "configs/quickstart.yaml"]
    command += ["--samples", "64", "4096", "--repeat", "3", "--json", str(saved)]
    done = start(*command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "a step whose engine and models answer at once" in done.stdout
    small, large = json.loads(saved.read_text())["rows"]
    assert (small["samples"], large["samples"]) == (64, 4096)
    stages = {"rollout", "reward", "forward", "advantages", "update_critic", "update_actor", "sync"}
    assert stages < small["stages"].keys() == large["stages"].keys()
    # The minimum of several steps, because other processes on the same cores can only make steps slower.
    small_ms, large_ms = (1e3 * min(row["cpu_seconds"]) / row["samples"] for row in (small, large))
    assert large_ms < FLAT * small_ms
    assert large_ms < MOST_MILLISECONDS and small_ms < MOST_MILLISECONDS


def test_time_outside_of_model_stages() -> None:
    inside = {"time/rollout": 2.0, "time/forward": 1.0, "time/update_critic": 3.0}
    steps = [{**inside, "time/sync": 1.0, "time/update_actor": actor, "time/step": 10.0} for actor in (1.0, 3.0, 4.0)]
    assert outside_share(steps) == pytest.approx(0.1)
