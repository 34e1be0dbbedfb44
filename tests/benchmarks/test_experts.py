"""The benchmark of experts runs, the compared implementations have equal results, and small experts are faster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.harness import start


@pytest.mark.waits
@pytest.mark.slow
def test_experts_benchmark_prints_and_saves_a_table(tmp_path: Path) -> None:
    saved = tmp_path / "experts.json"
    command = ["benchmarks.experts", "--device", "cpu"]
    command += ["--shapes", "64x32", "--threads", "1", "--repeat", "9"]
    done = start(*command, "--json", saved)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "512 tokens to 8 of 128 experts, 1 thread" in done.stdout and "speedup" in done.stdout
    rows = json.loads(saved.read_text())["rows"]
    assert [(row["what"], row["shape"]["dtype"]) for row in rows] == [
        (what, dtype) for dtype in ("float32", "bfloat16") for what in ("experts", "layer")
    ]
    for row in rows:
        assert 0 <= row["difference"] < (1e-6 if row["shape"]["dtype"] == "float32" else 1e-2)
        # Measured: 4.1 in float32 and 2.9 in bfloat16 for the experts alone, 3.2 and 2.8 for the layer.
        assert row["speedup"] == row["megatron_seconds"] / row["grouped_seconds"] > 1.5
