"""Runs with an engine, a reward, a data source and a model family outside megappo, which the settings name by path."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megappo.checkpoint.files import read_marker
from megappo.observe.metrics import read_metrics
from tests.support.harness import succeed
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from megappo.cli import main
sys.exit(main())
"""


SHORT = (
    "run.steps=2", "rollout.prompts_per_step=10", "actor.minibatch_sequences=40", "critic.minibatch_sequences=40",
)  # fmt: skip


def megappo_with(folder: Path, part: str, *arguments: str, processes: int = 0) -> str:
    """Run megappo with a file of the tests as the module `of_mine` in a folder of the user."""
    shutil.copy(ROOT / "tests" / "support" / part, folder / "of_mine.py")
    program = folder / "megappo_with_mine.py"
    program.write_text(PROGRAM.format(folder=str(folder)))
    return succeed(program, *arguments, processes=processes)


def test_run_with_components_of_the_user(tmp_path: Path) -> None:
    file, scoring = tmp_path / "of_mine.py", tmp_path / "scoring.py"
    shutil.copy(ROOT / "tests" / "support" / "outside_reward.py", scoring)
    overrides = [
        f"run.directory={tmp_path / 'run'}", *SHORT, "rollout.engine=of_mine:PlainEngine",
        f"rollout.engine_options={{log: {tmp_path / 'asked'}}}", f"reward.function={scoring}:digits",
        "algorithm.estimator=of_mine:rest_of_rewards", "algorithm.estimator_options={scale: 0.5}",
        "algorithm.policy_loss=of_mine:reinforce", f"data.train={{source: '{file}:questions', options: {{size: 25}}}}",
        "data.validation={source: 'of_mine:questions', options: {size: 4}}", "evaluation.every_steps=2",
        "checkpoint={}",
    ]  # fmt: skip
    printed = megappo_with(tmp_path, "outside.py", "train", "configs/quickstart.yaml", *overrides, processes=2)
    output = " ".join(printed.replace("│", "").split())
    assert "of_mine:PlainEngine on every rank" in output
    assert "of_mine:PlainEngine' are planned as for the embedded engine" in output
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["mismatch/mean"] < 1e-4 and line["actor/updates"] > 0 for line in lines[1:])
    assert all(0 < line["reward/mean"] < 1 for line in lines[1:])
    assert "of_mine:rest_of_rewards (gamma" in output and "policy loss of_mine:reinforce" in output
    assert all(line["actor/surprise"] > 0 and line["actor/clipfrac"] == 0 for line in lines[1:])
    (marker,) = (tmp_path / "run" / "checkpoints").glob("*/checkpoint.json")
    digests = {str(own): hashlib.sha256(own.read_bytes()).hexdigest() for own in (file, scoring)}
    assert read_marker(marker.parent).content["own_files"] == digests
    # Each rank has its share of the requests of two steps and of the evaluations before step 1 and after step 2.
    assert [(tmp_path / f"asked-{rank}").read_text().split() for rank in (0, 1)] == [["2", "40", "40", "2"]] * 2


def test_run_with_a_family_of_the_user(tmp_path: Path) -> None:
    """The actor under TP2 and the critic under PP2 are planned and trained. The checkpoint is exported, and
    transformers loads the export."""
    run, model, out = tmp_path / "run", tmp_path / "model", tmp_path / "out"
    shutil.copytree(ROOT / "configs/models/tiny_arithmetic", model)
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"model_type": "arcee", "hidden_act": "relu2"}))
    settings = [f"run.directory={run}", f"model.path={model}", "model.family=of_mine:FAMILY", "checkpoint={}", *SHORT]
    megappo_with(tmp_path, "outside_family.py", "train", "configs/quickstart.yaml", *settings, processes=2)
    lines = read_metrics(run / "metrics.jsonl")
    assert all(0 < line["mismatch/max"] < 1e-4 and line["actor/updates"] > 0 for line in lines if line["step"])
    megappo_with(tmp_path, "outside_family.py", "export", str(run), str(out), "--family", "of_mine:FAMILY")
    final, exported = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "final", out))
    assert final.config.model_type == "arcee"
    for name, tensor in final.named_parameters():
        assert torch.equal(tensor, exported.get_parameter(name)), name
