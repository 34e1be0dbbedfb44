"""The acceptance command's step with a real SGLang server, on a CPU."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.support.harness import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of the acceptance's third part."""
    out = tmp_path_factory.mktemp("acceptance")
    words = ["--device", "cpu", "--tiny", "--part", "3", "--minutes", "19", "--out", str(out)]
    done = start("tests.gpu.gpu_acceptance", *words, timeout_seconds=1200)
    assert done.returncode == 0, done.stdout + (out / "gpu-acceptance-part3.log").read_text()[-3000:]
    found: list[dict[str, Any]] = json.loads((out / "gpu-acceptance-part3.json").read_text())["rows"]
    return found


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", ["servers", "server-experts"])
def test_three_steps_through_a_server(rows: list[dict[str, Any]], name: str) -> None:
    found = [row for row in rows if row["step"] == name]
    held = [row["what"] for row in found if row["verdict"] == "ok"]
    kinds = ("engine beside trainer, nats", "engine beside trainer, nats, largest", "restarts")
    assert held == [*(f"step {n}: {kind}" for n in (1, 2, 3) for kind in kinds), "versions"]
    rates = [row["numbers"]["gigabytes_per_second"] for row in found if "sync with" in row["what"]]
    assert len(rates) == 3 and min(rates) > 0


@pytest.mark.timeout(1300)
def test_graphs_learning_and_a_killed_server(rows: list[dict[str, Any]]) -> None:
    held = {(row["step"], row["what"]) for row in rows if row["verdict"] == "ok" and row["step"] != "servers"}
    assert held >= {
        ("server-graphs", "graphs of prefill"),
        ("server-learning", "reward"),
        ("server-learning", "engine beside trainer, nats"),
        ("server-killed", "restarts"),
        ("server-killed", "engine beside trainer after the restart, nats"),
        ("server-killed", "engine beside trainer after the restart, nats, largest"),
    }
