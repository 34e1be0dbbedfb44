"""The acceptance command's step with a real SGLang server, on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.harness import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs launch/requirements-sglang.txt"),
]


def test_three_steps_through_a_server(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--tiny", "--only", "servers", "--part", "2", "--minutes", "9", "--out", str(tmp_path)]
    command = ["tests.gpu.gpu_acceptance", *words]
    done = start(*command, timeout_seconds=570)
    assert done.returncode == 0, done.stdout + (tmp_path / "gpu-acceptance-part2.log").read_text()[-3000:]
    rows = json.loads((tmp_path / "gpu-acceptance-part2.json").read_text())["rows"]
    held = [row["what"] for row in rows if row["verdict"] == "ok"]
    kinds = ("engine beside trainer, nats", "restarts")
    assert held == [*(f"step {n}: {kind}" for n in (1, 2, 3) for kind in kinds), "versions"]
    rates = [row["numbers"]["gigabytes_per_second"] for row in rows if row["verdict"] == "measured"]
    assert len(rates) == 3 and min(rates) > 0
