"""The steps of the acceptance command with a real SGLang server, on a CPU."""

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
"""The steps of each test run. The other steps differ in one setting of the server."""
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the table rows of the third part. With `--all` the part has all steps."""
    out = tmp_path_factory.mktemp("acceptance")
    only = () if request.config.getoption("--all") else ("--only", *FEW)
    command = ["--device", "cpu", "--tiny", "--part", "3", "--minutes", "19", "--out", str(out), *only]
    done = start("tests.gpu.gpu_acceptance", *command, timeout_seconds=1200)
    (table,) = out.glob("gpu-acceptance*.json")
    assert done.returncode == 0, done.stdout + table.with_suffix(".log").read_text()[-3000:]
    table_rows: list[dict[str, Any]] = json.loads(table.read_text())["rows"]
    return table_rows


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", ["servers", pytest.param("server-experts", marks=exhaustive)])
def test_three_steps_through_a_server(rows: list[dict[str, Any]], name: str) -> None:
    step_rows = [row for row in rows if row["step"] == name]
    passed = [row["what"] for row in step_rows if row["verdict"] == "ok"]
    kinds = ("engine beside trainer, nats", "engine beside trainer, nats, largest", "restarts")
    assert passed == [*(f"step {n}: {kind}" for n in (1, 2, 3) for kind in kinds), "versions"]
    rates = [row["numbers"]["gigabytes_per_second"] for row in step_rows if "sync with" in row["what"]]
    assert len(rates) == 3 and min(rates) > 0


def passed_checks(rows: list[dict[str, Any]], step: str) -> set[str]:
    """Return the passed checks of a step."""
    return {row["what"] for row in rows if row["verdict"] == "ok" and row["step"] == step}


@pytest.mark.timeout(1300)
def test_killed_server_is_restarted(rows: list[dict[str, Any]]) -> None:
    nats = "engine beside trainer after the restart, nats"
    assert passed_checks(rows, "server-killed") >= {"restarts", nats, f"{nats}, largest"}


@exhaustive
@pytest.mark.timeout(1300)
def test_acceptance_commands_of_a_killed_run(rows: list[dict[str, Any]]) -> None:
    """Each test run kills such a run on CPUs (sglang/test_resumed_runs.py). This step is for GPUs."""
    passed = passed_checks(rows, "server-commands")
    assert passed >= {"the run that was killed and continued", "step 3: engine beside trainer, nats"}


@exhaustive
@pytest.mark.timeout(1300)
def test_server_graphs_and_learning(rows: list[dict[str, Any]]) -> None:
    assert "graphs of prefill" in passed_checks(rows, "server-graphs")
    assert passed_checks(rows, "server-learning") >= {"reward", "engine beside trainer, nats"}
