"""Critics of other programs are read, any checkpoint is exported, and a run starts from another's models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from megappo.checkpoint.export import export_run
from megappo.checkpoint.identity import architecture_fields
from megappo.config.model_files import read_architecture
from tests.runs.test_resume import whole_tensors
from tests.support.attempts import attempts, train
from tests.support.models import write_model, write_value_model

pytestmark = [pytest.mark.slow, pytest.mark.waits]

STILL = ("actor.optimizer.learning_rate=1e-30", "critic.optimizer.learning_rate=1e-30")
"""Float32 weights stay what they were to the last bit."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one pass over 20 prompts in two steps, whose critic has a trained head and does not learn: `first`.

    Then `second` starts from its actor, and from its critic in Megatron-LM's format, on other layouts and learns
    nothing, is continued after `first` is gone (a copy is in `kept`), and others are refused.
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
        "run.steps=1",
        f"actor.start_from={first}@1",
        f"critic.start_from={megatron}",
        "run.export_final_model=false",
    )
    layouts = ("actor.layout={pipeline_parallel: 2}", "critic.layout={tensor_parallel: 2}")

    def refused(*overrides: str) -> dict[str, Any]:
        return train(root / "refused", *base, "run.steps=1", *overrides, expect="2")

    output = attempts(root, train(first, *base, *epochs, STILL[1]))
    export_run(str(first), str(megatron), "critic", form="torch_dist")
    output += attempts(
        root,
        train(second, *base, *start, *layouts, *STILL),
        refused(f"actor.start_from={first}@7"),
        refused(f"actor.start_from={other}"),
        refused(f"critic.start_from={root}"),
        refused("critic.value_head_std=0.1"),
    )
    shutil.move(first, root / "kept")
    shutil.rmtree(megatron)
    output += attempts(root, train(second, *base, *start, *layouts, *STILL, "run.steps=2"))
    (root / "output").write_text(output)
    return root


def exported(world: Path, tmp_path: Path, run: str, role: str, step: str) -> dict[str, torch.Tensor]:
    """Tensors of an export from a run directory that holds checkpoints and settings, and nothing else."""
    unfinished = tmp_path / "unfinished"
    if not unfinished.exists():
        unfinished.mkdir(parents=True)
        shutil.copy(world / run / "config.yaml", unfinished)
        shutil.copytree(world / run / "checkpoints", unfinished / "checkpoints")
    out = tmp_path / f"{role}-{step}"
    said = export_run(str(unfinished), str(out), role, step)
    assert said[-1].endswith(f"is in {out}")
    return load_file(out / "model.safetensors")


def test_epochs_are_steps(world: Path) -> None:
    said = (world / "output").read_text()
    assert "1 epoch of 20 prompts = 2" in said
    lines = (world / "kept/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    marker = json.loads((world / "kept/checkpoints/step-000002/checkpoint.json").read_text())
    assert marker["body"]["content"]["steps"] == 2


def test_checkpoints_say_what_their_weights_mean(world: Path) -> None:
    """By themselves, so that a run can start from them where the model's folder is gone."""
    marker = json.loads((world / "kept/checkpoints/step-000002/checkpoint.json").read_text())
    for role, folder in (("actor", "model"), ("critic", "critic")):
        fields: dict[str, Any] = architecture_fields(read_architecture(world / folder))
        assert marker["body"]["content"]["architectures"][role] == fields
        assert fields["ropes"][0][:2] == [1, 1]  # the factor, and the first channel pair's radian per position


def test_any_checkpoint_is_exported(world: Path, tmp_path: Path) -> None:
    """By one process, of a run that has not finished."""
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
    wanted = first if rewards[0] > rewards[1] else latest
    assert all(torch.equal(best[name], wanted[name]) for name in best)


def test_exports_say_what_is_missing(world: Path, tmp_path: Path) -> None:
    for words, wanted in (
        (("actor", "7"), r"contains no checkpoint of step '7'; finished steps: 1, 2; name a step, best or latest"),
        (("actor", "9" * 5000), r"contains no checkpoint of step '9"),
    ):
        with pytest.raises(ValueError, match=wanted):
            export_run(str(world / "kept"), str(tmp_path / "out"), *words)
    with pytest.raises(ValueError, match=r"has no checkpoint\.keep_best to select the best; finished steps: 1, 2"):
        export_run(str(world / "second"), str(tmp_path / "out"), "actor", "best")
    with pytest.raises(ValueError, match=r"is not an empty folder; name a new folder"):
        export_run(str(world / "kept"), str(world / "kept"))


def test_a_trained_critic_is_read_and_exported(world: Path, tmp_path: Path) -> None:
    """With a head as TRL writes it under PP2 in, a token classifier with the same weights out."""
    tensors = exported(world, tmp_path, "kept", "critic", "latest")
    given = load_file(world / "critic/model.safetensors")
    names = {"score.weight": "v_head.summary.weight", "score.bias": "v_head.summary.bias"}
    assert len(tensors) == len([name for name in given if name.startswith("model.")]) + 2
    for name, tensor in tensors.items():
        assert torch.equal(tensor, given[names.get(name, name)]), name
    _, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic-latest", output_loading_info=True)
    assert not any(info.values()), info


def test_a_run_starts_from_the_models_of_another(world: Path, tmp_path: Path) -> None:
    """On other layouts; neither learns, so that the weights are still the other's. It continues without the other."""
    for role, step in (("actor", "1"), ("critic", "2")):
        before = exported(world, tmp_path / role, "kept", role, step)
        after = exported(world, tmp_path / f"{role}-second", "second", role, "latest")
        assert all(torch.equal(before[name], after[name]) for name in before | after)
    said = (world / "output").read_text()
    assert "the actor begins with that of" in said
    assert f"the critic begins with {world / 'megatron/release'}" in said
    assert "continuing after step 1 from" in said
    assert not (world / "first").exists()


def test_what_a_run_cannot_start_from_is_said(world: Path) -> None:
    said = (world / "output").read_text()
    assert "first@7': " in said and "contains no checkpoint of step '7'; finished steps: 1, 2" in said
    assert "differs in ffn_hidden_size" in said and "give a model of the same architecture" in said
    assert f"critic.start_from '{world}': {world} is of no known kind; give a run directory" in said
    assert "critic.value_head_std 0.1 is for a new value head, but the critic's weights have one" in said
    assert "megappo/commands/train.py" not in said  # no traceback of ours
