"""The benchmark of scaling distributes work over worlds and reports the efficiency."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.scaling import World, rows_of
from benchmarks.sides import Turn
from megappo.config import load_config
from tests.support.harness import start
from tests.support.places import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


@pytest.mark.parametrize(("kind", "prompts", "minibatch"), [("weak", 200, 800), ("strong", 50, 200)])
@pytest.mark.parametrize(("axis", "tensor", "pipeline"), [("data", 2, 2), ("tensor", 4, 2), ("pipeline", 2, 4)])
def test_strong_and_weak_scaling_of_worlds(
    kind: str, prompts: int, minibatch: int, axis: str, tensor: int, pipeline: int
) -> None:
    base = load_config(QUICKSTART)
    config = load_config(QUICKSTART, list(World(kind, 4, axis).overrides(base)))
    assert config.critic is not None
    assert config.rollout.prompts_per_step == prompts
    assert {role.minibatch_sequences for role in config.trained.values()} == {minibatch}
    assert config.actor.layout.tensor_parallel == tensor and config.critic.layout.pipeline_parallel == pipeline


def test_efficiency_uses_the_available_cores() -> None:
    def turns(tokens: float, *seconds: float) -> list[Turn]:
        return [Turn(s, s, 10, {"step_tokens": tokens, "time/step": s}) for s in seconds]

    worlds = {
        World("weak", 1, "data"): turns(100, 1.0, 5.0, 2.0),
        World("weak", 4, "data"): turns(400, 5.0, 4.0, 6.0),
        World("strong", 2, "data"): turns(100, 1.0),
        World("strong", 4, "data"): turns(100, 1.0),
    }
    rows = rows_of(worlds, samples=8, cores=2, threads=1)
    assert [row.samples for row in rows] == [8, 32, 8, 8]
    assert [row.median_seconds for row in rows] == [2, 5, 1, 1]
    assert [row.tokens_per_second for row in rows] == [50, 80, 100, 100]
    assert [row.efficiency for row in rows] == [1, 0.8, 1, 1]
    assert rows[1].samples_per_second == 32 / 5 and rows[1].stages == {"step": 5.0}


@pytest.mark.exhaustive
@pytest.mark.waits
@pytest.mark.slow
def test_scaling_benchmark_prints_and_saves_a_table(tmp_path: Path) -> None:
    saved = tmp_path / "scaling.json"
    command = ["benchmarks.scaling", "configs/quickstart.yaml"]
    command += ["actor.layout={}", "critic.layout={}", "rollout.prompts_per_step=2", "actor.minibatch_sequences=8"]
    command += ["critic.minibatch_sequences=8", "--kinds", "weak", "--worlds", "1", "2", "--rounds", "1"]
    done = start(*command, "--json", saved)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "data parallel, 1 thread each" in done.stdout and "of perfect" in done.stdout
    rows = json.loads(saved.read_text())["rows"]
    assert [(row["processes"], row["samples"]) for row in rows] == [(1, 16), (2, 32)]
    for row in rows:
        assert len(row["seconds"]) == 3 and row["median_seconds"] == statistics.median(row["seconds"])
        assert 0 < row["stages"]["update_actor"] < row["stages"]["step"]
    assert rows[0]["efficiency"] == 1
    assert rows[1]["peak_bytes"] > 1.5 * rows[0]["peak_bytes"]  # two processes
