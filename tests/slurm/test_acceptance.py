"""Real SLURM: the acceptance job runs on two virtual nodes and reports failed steps."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.acceptance.nodes import Shape
from tests.gpu.acceptance.nodes import rows as node_rows
from tests.gpu.acceptance.nodes import steps as node_steps
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import job_environment
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]
exhaustive = pytest.mark.exhaustive
sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment")

SMALL = (
    "actor.layout={}", "critic.layout={}", "rollout.prompts_per_step=10",
    "actor.minibatch_sequences=40", "critic.minibatch_sequences=40", "runtime.threads_per_rank=1",
)  # fmt: skip
LAYOUTS = {"DP2", "TP2 with sequence parallelism", "PP2", "EP2"}
STEPS = ["links", "layouts", "engine", "engine-tp", "broadcast", "kill", "resume", "learning"]


def accept(
    cluster: Cluster, folder: Path, *arguments: str, only: str = ""
) -> tuple[dict[str, str], Path, list[dict[str, Any]]]:
    """Run the acceptance job on both nodes. Return the state, the folder of the logs, and the rows of the table."""
    environment = job_environment(cluster, MEGAPPO_LOGS=folder / "logs", MEGAPPO_ENGINE_LINGER=1)
    environment |= {"MEGAPPO_ACCEPTANCE_STEPS": only} if only else {}
    command = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={folder}/job.out"]
    job = int(cluster.run(*command, "launch/slurm/acceptance.sbatch", *arguments, cwd=ROOT, env=environment).strip())
    state = cluster.wait(job, "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", seconds=1200)
    logs = folder / "logs" / str(job) / "attempt-0"
    table = logs / "node-acceptance.json"
    return state, logs, json.loads(table.read_text())["rows"] if table.exists() else []


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ("quickstart", ["links", "engine", "engine-tp"]),
        pytest.param("quickstart", ["links", "layouts", "engine", "engine-tp", "kill", "resume"], marks=exhaustive),
        pytest.param("sglang_quickstart", STEPS, marks=[sglang, exhaustive]),
    ],
    ids=["few", "embedded", "servers"],
)
def test_acceptance_job_passes_on_two_nodes(cluster: Cluster, tmp_path: Path, config: str, steps: list[str]) -> None:
    """With servers, all steps run. The embedded engine has no broadcast. The step of fifty learning steps is tested in
    `test_rising_score_passes_the_learning_step`."""
    state, logs, rows = accept(cluster, tmp_path, f"configs/{config}.yaml", *SMALL, only=" ".join(steps))
    output = cluster.log(state) + (logs / "node-acceptance.md").read_text()
    assert state["JobState"] == "COMPLETED", output
    assert list(dict.fromkeys(row["step"] for row in rows)) == steps
    by_step = {step: {row["what"]: row for row in rows if row["step"] == step} for step in steps}
    assert {row["verdict"] for row in rows} == {"ok", "measured", "skipped"}
    assert [row["step"] for row in rows if row["verdict"] == "skipped"] == ["engine-tp"], (
        "tensor parallelism needs two ranks per node"
    )
    if "layouts" in steps:
        assert {what.split(":")[0] for what in by_step["layouts"]} == LAYOUTS
    for step in {"engine", "broadcast"} & set(steps):
        assert by_step[step]["steps"]["result"] == "6 of 6"
        assert by_step[step]["sync"]["numbers"]["gigabytes_per_second"] > 0
    if "resume" in steps:
        assert "equal to the last bit" in by_step["resume"]["metrics of all steps, killed and continued"]["result"]
    shown = (logs / "node-acceptance.md").read_text()
    assert all(row["what"] in shown for row in rows) and "2 x 1, CPU" in shown


@pytest.mark.timeout(600)
def test_failed_step_does_not_end_other_steps(cluster: Cluster, tmp_path: Path) -> None:
    """The configuration is invalid. Each step that needs the configuration fails with the error message, and the job
    fails. Steps that are not selected are excluded."""
    only = ["links", "engine", "engine-tp"]
    arguments = ("configs/quickstart.yaml", "actor.nonsense=1")
    state, _, rows = accept(cluster, tmp_path, *arguments, only=" ".join(only))
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "1:0")
    verdicts = {row["step"]: row["verdict"] for row in rows}
    assert verdicts == dict.fromkeys(only, "failed") | {"engine-tp": "skipped"}
    assert all("nonsense" in row["result"] for row in rows if row["step"] in ("links", "engine"))


@pytest.mark.parametrize(("rise", "verdict"), [(0.01, "ok"), (-0.01, "failed")])
def test_rising_score_passes_the_learning_step(tmp_path: Path, rise: float, verdict: str) -> None:
    (tmp_path / "learning").mkdir()
    lines = [{"reward/mean": 0.5 + rise * n, "time/step": 1.0, "tokens_per_second": 9.0} for n in range(50)]
    shape = Shape(2, 1, tmp_path)
    (step,) = [s for s in node_steps(shape, ["configs/quickstart.yaml"]) if s.name == "learning"]
    for count, expected in ((50, verdict), (49, "failed")):
        written = "".join(json.dumps(line) + "\n" for line in lines[:count])
        (tmp_path / "learning" / "metrics.jsonl").write_text(written)
        verdicts = {row.what: row.verdict for row in node_rows(step, shape, 0)}
        assert verdicts == {f"score over {count} steps": expected, "the last step": "measured"}
