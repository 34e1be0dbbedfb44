"""The benchmark of the weight sync runs and prints the expected table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.harness import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment"),
]


def test_benchmark_prints_the_table(tmp_path: Path) -> None:
    out = tmp_path / "sync.json"
    command = ("configs/sglang_quickstart.yaml", "rollout.sync_bucket_bytes=50000", "--repeat", "2", "--json", out)
    done = start("benchmarks.weight_sync", *command, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(out.read_text())
    rows = {row["way"]: row for row in results["rows"]}
    assert list(rows) == ["copy", "sync", "unverified", "verl", "slime"]
    assert all(row["seconds"] > 0 and row["gigabytes_per_second"] > 0 for row in rows.values())
    assert rows["sync"]["phases"].keys() == {"gather", "load", "verify", "session", "wake"}
    assert rows["sync"]["phases"]["verify"] > rows["unverified"]["phases"]["verify"]
    assert results["received_bytes"] == [0, 0]  # both ranks share the memory
    assert "received: rank 0 0 GB, rank 1 0 GB" in done.stdout
    assert "of the copy" in done.stdout and "x slime's way" in done.stdout
