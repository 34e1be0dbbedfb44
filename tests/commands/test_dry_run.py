"""The table and the command that `megappo train --dry-run` prints."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.plan.machines import MACHINES
from megappo.types import Prompt
from tests.support.places import ROOT

pytestmark = pytest.mark.waits


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("MEGAPPO_LAUNCH", raising=False)


def dry_run(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    assert main(["train", "configs/quickstart.yaml", "--dry-run", *overrides]) == 0
    return " ".join(re.sub("[│┃]", " ", capsys.readouterr().out).split())


@pytest.mark.parametrize(("epochs", "steps"), [(2, 1), (8, 4), (0.5, 1)])
def test_updates_of_epochs_are_counted(capsys: pytest.CaptureFixture[str], epochs: float, steps: int) -> None:
    """There are 25 prompts. A step has 50 prompts and 4 updates of each role."""
    overrides = ["run.steps=null", f"run.epochs={epochs}", "actor.optimizer.warmup_ratio=0.5"]
    output = dry_run(capsys, *overrides, "actor.optimizer.warmup_updates=0")
    assert f"{epochs:g} epochs of 25 prompts = {steps} steps" in output.replace("epoch of", "epochs of")
    assert output.count(f"= 4 per step, {4 * steps} in all") == 2
    assert f"0.001 linear, warm-up {2 * steps}" in output


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_missing_packages_of_loggers_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["logging.wandb_project=sums", "logging.loggers={no_such_module:Logger: {}}"]
    assert main(["train", "configs/quickstart.yaml", "--dry-run", *overrides]) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert "logging.wandb_project is 'sums', but wandb is not installed; pip install '.[wandb]'" in errors
    assert "logging.loggers 'no_such_module:Logger'" in errors


@pytest.mark.parametrize(
    ("options", "launch"),
    [
        (["--machine", "h100", "--gpus", "2"], "--nproc-per-node 2 -m"),
        (["--machine", "h100", "--gpus", "8"], "--nproc-per-node 8 -m"),
        (
            ["--machine", "h100", "--gpus", "16"],
            "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m",
        ),
        (["--machine", "cpu", "--gpus", "16"], "--nproc-per-node 16 -m"),
    ],
)
def test_command_starts_one_process_per_device(
    capsys: pytest.CaptureFixture[str], options: list[str], launch: str
) -> None:
    output = dry_run(capsys, *options, "model.accelerations=torch")
    assert f"would run: torchrun {launch} megappo train configs/quickstart.yaml" in output
    assert ("on each machine; HOST is the first" in output) == ("--nnodes" in launch)


@pytest.mark.parametrize(
    ("ranks", "nodes"), [(1, 1), (7, 1), (8, 1), (9, 3), (12, 2), (16, 2), (20, 4), (24, 3), (13, 13), (4096, 512)]
)
def test_each_machine_has_the_same_number_of_ranks(ranks: int, nodes: int) -> None:
    assert MACHINES["h100"].nodes_of(ranks) == (nodes, ranks // nodes) and ranks // nodes <= 8


def test_environment_of_a_file_is_created_and_not_played(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "guesser.py").write_text("class Guess:\n    async def run(self, session):\n        raise KeyError\n")
    environment = f"rollout.environment={{name: '{tmp_path}/guesser.py:Guess'}}"
    output = dry_run(capsys, environment, "reward.function=environment")
    assert "Guess of guesser.py; tools: none in workers; no episode was played" in output


def test_documented_attributes_of_a_prompt_are_complete() -> None:
    for document in ("environments/README.md", "guides/agents.md"):
        text = (ROOT / "megappo" / document).read_text()
        start = text.index("`text`")
        names = re.findall(r"`(\w+)`", text[start : text.index("`source`", start) + len("`source`")])
        assert sorted(set(names)) == sorted(field.name for field in fields(Prompt)), document
