"""Import of critics from other programs, export of any checkpoint, and a start from the models of a different run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from megappo.checkpoint.exports.export import export_run
from megappo.checkpoint.identity import architecture_fields
from megappo.models.model_files import read_architecture
from tests.runs.test_resume import whole_tensors
from tests.support.attempts import attempts, train
from tests.support.models import write_model, write_value_model

pytestmark = [pytest.mark.slow, pytest.mark.waits]

STILL = ("actor.optimizer.learning_rate=1e-30", "critic.optimizer.learning_rate=1e-30")
"""Float32 weights remain bitwise equal."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two steps of one epoch over 20 prompts with a frozen critic whose value head is trained: `first`.

    Then `second` starts from this actor, and from this critic in the format of Megatron-LM, on other layouts with a
    learning rate near zero. The run continues after `first` has moved to `kept`. Other starts are refused.
    """
    root = tmp_path_factory.mktemp("world")
    model = write_model(root / "model", "qwen3", 3, vocab_size=17, tie_word_embeddings=True)
    critic = write_value_model(root / "critic", "qwen3", 5, "v_head.summary", vocab_size=17, tie_word_embeddings=True)
    other = write_model(root / "other", "qwen3", 3, vocab_size=17, intermediate_size=64)
    base = (
        f"model.path={model}", "model.init=pretrained", "model.tokenizer=configs/models/tiny_arithmetic",
        "model.dtype=float32", f"critic.path={critic}", "checkpoint.every_steps=1", "evaluation=null",
        "data.validation=null", "actor.optimizer.schedule=constant",
    )  # fmt: skip
    first, second = root / "first", root / "second"
    epochs = ("run.epochs=1", "data.train.limit=20", "checkpoint.keep_best=reward/mean")
    megatron = root / "megatron"
    start = (
        "run.steps=1", f"actor.start_from={first}@1", f"critic.start_from={megatron}", "run.export_final_model=false",
    )  # fmt: skip
    layouts = ("actor.layout={pipeline_parallel: 2}", "critic.layout={tensor_parallel: 2}")

    def refused(*overrides: str) -> dict[str, Any]:
        return train(root / "refused", *base, "run.steps=1", *overrides, expect="2")

    output = attempts(root, train(first, *base, *epochs, STILL[1]))
    export_run(str(first), str(megatron), "critic", form="torch_dist")
    output += attempts(
        root, train(second, *base, *start, *layouts, *STILL), refused(f"actor.start_from={first}@7"),
        refused(f"actor.start_from={other}"), refused(f"critic.start_from={root}"),
        refused("critic.value_head_std=0.1"),
    )  # fmt: skip
    shutil.move(first, root / "kept")
    shutil.rmtree(megatron)
    output += attempts(root, train(second, *base, *start, *layouts, *STILL, "run.steps=2"))
    (root / "output").write_text(output)
    return root


def exported(world: Path, tmp_path: Path, run: str, role: str, step: str) -> dict[str, torch.Tensor]:
    """Export from a run directory that contains only checkpoints and settings, and load the tensors."""
    unfinished = tmp_path / "unfinished"
    if not unfinished.exists():
        unfinished.mkdir(parents=True)
        shutil.copy(world / run / "config.yaml", unfinished)
        shutil.copytree(world / run / "checkpoints", unfinished / "checkpoints")
    out = tmp_path / f"{role}-{step}"
    messages = export_run(str(unfinished), str(out), role, step)
    assert messages[-1].endswith(f"is in {out}")
    return load_file(out / "model.safetensors")


def test_epochs_determine_the_steps(world: Path) -> None:
    output = (world / "output").read_text()
    assert "1 epoch of 20 prompts = 2" in output
    lines = (world / "kept/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    marker = json.loads((world / "kept/checkpoints/step-000002/checkpoint.json").read_text())
    assert marker["body"]["content"]["steps"] == 2


def test_checkpoints_record_the_architecture(world: Path) -> None:
    """A run can start from the checkpoint if the folder of the model no longer exists."""
    marker = json.loads((world / "kept/checkpoints/step-000002/checkpoint.json").read_text())
    for role, folder in (("actor", "model"), ("critic", "critic")):
        fields: dict[str, Any] = architecture_fields(read_architecture(world / folder))
        assert marker["body"]["content"]["architectures"][role] == fields
        assert fields["ropes"][0][:2] == [1, 1]  # the factor, and the first channel pair's radian per position


def test_any_checkpoint_can_be_exported(world: Path, tmp_path: Path) -> None:
    """One process exports a checkpoint of an unfinished run."""
    first, latest = (exported(world, tmp_path, "kept", "actor", step) for step in ("1", "latest"))
    final = load_file(world / "kept/final/model.safetensors")
    assert latest.keys() == final.keys() == first.keys()
    assert all(torch.equal(latest[name], final[name]) for name in final)
    stored = whole_tensors(world / "kept/checkpoints/step-000001")
    for name in ("model.norm.weight", "model.layers.3.mlp.up_proj.weight"):
        assert torch.equal(first[name], stored[f"actor.weight.{name}"])
        assert not torch.equal(first[name], latest[name])
    rewards = [json.loads(line)["reward/mean"] for line in (world / "kept/metrics.jsonl").read_text().splitlines()]
    best = exported(world, tmp_path, "kept", "actor", "best")
    expected = first if rewards[0] > rewards[1] else latest
    assert all(torch.equal(best[name], expected[name]) for name in best)


def test_export_reports_missing_checkpoints(world: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("actor", "7"), r"contains no checkpoint of step '7'; finished steps: 1, 2; name a step, best or latest"),
        (("actor", "9" * 5000), r"contains no checkpoint of step '9"),
    ):
        with pytest.raises(ValueError, match=message):
            export_run(str(world / "kept"), str(tmp_path / "out"), *arguments)
    with pytest.raises(ValueError, match=r"has no checkpoint\.keep_best to select the best; finished steps: 1, 2"):
        export_run(str(world / "second"), str(tmp_path / "out"), "actor", "best")
    with pytest.raises(ValueError, match=r"is not an empty folder; name a new folder"):
        export_run(str(world / "kept"), str(world / "kept"))


def test_critic_of_trl_is_loaded_and_exported(world: Path, tmp_path: Path) -> None:
    """The critic has a value head in the format of TRL and trains under PP2. The export is a token classifier with
    the same weights."""
    tensors = exported(world, tmp_path, "kept", "critic", "latest")
    initial = load_file(world / "critic/model.safetensors")
    names = {"score.weight": "v_head.summary.weight", "score.bias": "v_head.summary.bias"}
    assert len(tensors) == len([name for name in initial if name.startswith("model.")]) + 2
    for name, tensor in tensors.items():
        assert torch.equal(tensor, initial[names.get(name, name)]), name
    _, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic-latest", output_loading_info=True)
    assert not any(info.values()), info


def test_run_starts_from_existing_models(world: Path, tmp_path: Path) -> None:
    """The new run has other layouts and does not learn, so its weights equal those of the first run. The run
    continues without the first run."""
    for role, step in (("actor", "1"), ("critic", "2")):
        before = exported(world, tmp_path / role, "kept", role, step)
        after = exported(world, tmp_path / f"{role}-second", "second", role, "latest")
        assert all(torch.equal(before[name], after[name]) for name in before | after)
    output = (world / "output").read_text()
    assert "the actor begins with that of" in output
    assert f"the critic begins with {world / 'megatron/release'}" in output
    assert "continuing after step 1 from" in output
    assert not (world / "first").exists()


def test_impossible_starts_are_refused(world: Path) -> None:
    output = (world / "output").read_text()
    assert "first@7': " in output and "contains no checkpoint of step '7'; finished steps: 1, 2" in output
    assert "differs in ffn_hidden_size" in output and "give a model of the same architecture" in output
    assert f"critic.start_from '{world}': {world} is of no known kind; give a run directory" in output
    assert "critic.value_head_std 0.1 is for a new value head, but the critic's weights have one" in output
    assert "megappo/commands/train.py" not in output  # no traceback of megappo
