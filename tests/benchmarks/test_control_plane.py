"""The cost of a step for a rank outside of models is small in worlds of a thousand ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.control_plane import STAGES, Size, Spent, busiest, fit, planned_seconds, settings, simulate
from tests.support.harness import start
from tests.support.places import ROOT
from tests.support.quick import cases

LARGE = str(ROOT / "configs" / "qwen3_32b_64node_disaggregated_dapo_math.yaml")
TOKENS, SAMPLES_OF_A_RANK, MOST_OF_A_STEP = 64, 8, 0.01
BYTES_OF_A_SAMPLE = 8 * (3 + 2 * 2)
"""Bytes of a sample that each rank receives: number, length and response, and for actor and critic the number and the
unmasked tokens."""


@pytest.mark.parametrize("world", cases([64, 1024], quick=(64,)))
def test_rank_of_a_large_world_has_little_overhead(world: int, tmp_path: Path) -> None:
    size = Size(world, SAMPLES_OF_A_RANK * world, TOKENS)
    config = settings(LARGE, size.samples, str(tmp_path))
    spent = busiest(simulate(config, size))
    assert spent.seconds.keys() == set(STAGES)
    assert max(spent.seconds.values()) < MOST_OF_A_STEP * planned_seconds(LARGE)
    actor = config.actor.layout
    of_a_replica = size.samples * actor.tensor_parallel * actor.pipeline_parallel // world
    most_samples = (1 + config.actor.epochs) * of_a_replica
    own_bytes = 2 * (8 + 5 * 4) * TOKENS * most_samples  # tokens with up to five numbers, for actor and critic
    assert spent.received_bytes < own_bytes + BYTES_OF_A_SAMPLE * size.samples + 1000 * world


def test_fit_recovers_the_parts_of_costs() -> None:
    made = {"constant": 1.0, "per rank": 1e-3, "per sample": 1e-4, "per sample of a rank": 1e-2}
    rows = []
    for size in [Size(world, samples, 1) for world in (8, 64, 512) for samples in (512, 4096)]:
        terms = (1.0, size.world, size.samples, size.samples / size.world)
        seconds = sum(share * term for share, term in zip(made.values(), terms, strict=True))
        rows.append((size, Spent({"forward": seconds})))
    assert fit(rows) == pytest.approx(made, rel=1e-3)


@pytest.mark.waits
def test_control_plane_benchmark_runs(tmp_path: Path) -> None:
    command = ["benchmarks.control_plane", "configs/quickstart.yaml", "--worlds", "2"]
    command += ["--samples", "64", "--tokens", str(TOKENS), "--json", str(tmp_path / "found.json")]
    done = start(*command)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "found.json").read_text())
    (row,) = results["rows"]
    assert row["world"] == 2 and row["samples"] == 64 and row["messages"] > 0
    assert row["received_bytes"] > 0 and row["total"] > 0 and "planned step" in done.stdout
