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


FEW = ("servers", "server-killed")
"""The steps that every run of the tests has; the others differ from them in a setting of the server."""
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of the third part's steps: all of them with `--all`."""
    out = tmp_path_factory.mktemp("acceptance")
    only = () if request.config.getoption("--all") else ("--only", *FEW)
    words = ["--device", "cpu", "--tiny", "--part", "3", "--minutes", "19", "--out", str(out), *only]
    done = start("tests.gpu.gpu_acceptance", *words, timeout_seconds=1200)
    (table,) = out.glob("gpu-acceptance*.json")
    assert done.returncode == 0, done.stdout + table.with_suffix(".log").read_text()[-3000:]
    found: list[dict[str, Any]] = json.loads(table.read_text())["rows"]
    return found


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", ["servers", pytest.param("server-experts", marks=exhaustive)])
def test_three_steps_through_a_server(rows: list[dict[str, Any]], name: str) -> None:
    found = [row for row in rows if row["step"] == name]
    held = [row["what"] for row in found if row["verdict"] == "ok"]
    kinds = ("engine beside trainer, nats", "engine beside trainer, nats, largest", "restarts")
    assert held == [*(f"step {n}: {kind}" for n in (1, 2, 3) for kind in kinds), "versions"]
    rates = [row["numbers"]["gigabytes_per_second"] for row in found if "sync with" in row["what"]]
    assert len(rates) == 3 and min(rates) > 0


def held_of(rows: list[dict[str, Any]], step: str) -> set[str]:
    """What held of a step."""
    return {row["what"] for row in rows if row["verdict"] == "ok" and row["step"] == step}


@pytest.mark.timeout(1300)
def test_a_killed_server(rows: list[dict[str, Any]]) -> None:
    nats = "engine beside trainer after the restart, nats"
    assert held_of(rows, "server-killed") >= {"restarts", nats, f"{nats}, largest"}


@exhaustive
@pytest.mark.timeout(1300)
def test_commands_as_they_are_typed(rows: list[dict[str, Any]]) -> None:
    """Every run of the tests has such a kill on CPUs (sglang/test_resumed_runs.py); this one is for GPUs."""
    held = held_of(rows, "server-commands")
    assert held >= {"the run that was killed and continued", "step 3: engine beside trainer, nats"}


@exhaustive
@pytest.mark.timeout(1300)
def test_graphs_and_learning(rows: list[dict[str, Any]]) -> None:
    assert "graphs of prefill" in held_of(rows, "server-graphs")
    assert held_of(rows, "server-learning") >= {"reward", "engine beside trainer, nats"}
