"""If a run is restarted, the record in the directory describes only the steps that were trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megappo.config import load_config
from tests.support.harness import start
from tests.support.saved import save_step, two_samples

pytestmark = [pytest.mark.slow, pytest.mark.waits]

SMALL = (
    "rollout.prompts_per_step=4", "actor.minibatch_sequences=16", "critic.minibatch_sequences=16", "actor.layout={}",
    "critic.layout={}", "evaluation.every_steps=2", "actor.optimizer.schedule=constant",
    "critic.optimizer.schedule=constant",
)  # fmt: skip
OTHER_RATE = "actor.optimizer.learning_rate=5e-3"


def content(run: Path) -> dict[str, tuple[bytes, int]]:
    """Return the bytes and the modification time of every file in the directory except the lock, which names the last
    process."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(run)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def megappo(*arguments: str, code: int = 0) -> str:
    done = start("megappo", *arguments, processes=1, timeout_seconds=120)
    assert done.returncode == code, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def rate_of(run: Path) -> float:
    return load_config(run / "config.yaml").actor.optimizer.learning_rate


def test_the_record_describes_only_trained_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("configs/quickstart.yaml", f"run.directory={run}", *SMALL)
    train = ("train", *arguments)
    megappo(*train, "run.steps=2")
    finished, rate = content(run), rate_of(run)
    output = megappo(*train, "run.steps=2", OTHER_RATE)
    assert "nothing is left to train" in output and f"the trained actor is in {run / 'final'}" in output
    assert content(run) == finished

    # These attempts end before the first step.
    save_step(tmp_path / "other", 1, two_samples(0))
    elsewhere = ("logging.save_experience={}", f"rollout.save_to={tmp_path / 'other'}")
    output = megappo(*train, "run.steps=3", OTHER_RATE, *elsewhere, code=2)
    assert "has experience of /runs/a; set a different folder, or remove this folder" in output
    megappo(*train, "run.steps=3", OTHER_RATE, "--dry-run")
    megappo("eval", *arguments, OTHER_RATE)
    assert content(run) == finished

    # The run trains its last step with a different learning rate.
    megappo(*train, "run.steps=3", OTHER_RATE)
    assert rate_of(run) == 5e-3
    change = f"actor.optimizer.learning_rate: {rate} -> 0.005"
    (line,) = map(json.loads, (run / "changes.jsonl").read_text().splitlines())
    assert line["step"] == 2 and change in line["changes"]
    card = (run / "final" / "README.md").read_text()
    assert "learning rate 0.005" in card and "after step 2: " in card
    output = megappo("report", str(run))
    assert f"settings changed after step 2: {change}" in output

    # If the export does not exist, the run writes the export with the settings of the last step.
    weights = (run / "final" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "final")
    others = content(run)
    megappo(*train, "run.steps=3", "actor.optimizer.learning_rate=7e-3")
    assert {name: x for name, x in content(run).items() if not name.startswith("final/")} == others
    assert (run / "final" / "README.md").read_text() == card
    assert (run / "final" / "model.safetensors").read_bytes() == weights
