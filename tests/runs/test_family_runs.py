"""A complete run of a model of each family, with a kill, a resume, and an export that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megappo.checkpoint.export import export_run
from megappo.cli import main
from tests.runs.test_resume import assert_same_tensors
from tests.support.attempts import assert_same_run, attempts, killed_at, train
from tests.support.models import add_mtp_layers, write_model
from tests.support.quick import cases

pytestmark = [pytest.mark.slow, pytest.mark.waits]

# The default layouts are TP2 of the actor and PP2 of the critic.
RUNS: dict[str, tuple[str, ...]] = {
    "mixtral": (
        "actor.layout={expert_parallel: 2}",
        "critic.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
    ),
    "glm4_moe": (
        "actor.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
        "critic.layout={pipeline_parallel: 2}",
    ),
    "gpt_oss": (
        "actor.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
        "critic.layout={pipeline_parallel: 2}",
    ),
    "deepseek_v3": (
        "actor.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
        "critic.layout={pipeline_parallel: 2}",
    ),
    "qwen3_next": (
        "actor.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
        "critic.layout={pipeline_parallel: 2}",
    ),
    "qwen3_5_text": (),
    "gemma2": (),
    "gemma3_text": ("actor.layout={pipeline_parallel: 2}", "critic.layout={tensor_parallel: 2}"),
    "gemma4_text": ("actor.layout={pipeline_parallel: 2}", "critic.layout={tensor_parallel: 2}"),
}


WITH_MTP = ("glm4_moe", "deepseek_v3", "qwen3_next")
"""Families whose test models have a multi-token prediction layer."""


FEW = ("gpt_oss", "qwen3_next")
"""Both families together have experts, routers, sinks, windows, two kinds of layers, two kinds of attention, and a
multi-token prediction layer."""


@pytest.mark.parametrize("family", cases(RUNS, exhaustive=RUNS.keys() - FEW))
def test_run_resumes_and_is_exported(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path / "model", family, 3, vocab_size=16, num_hidden_layers=2)
    mtp = add_mtp_layers(model) if family in WITH_MTP else {}
    settings = (
        "run.steps=3", "checkpoint.every_steps=1", "evaluation=null", "actor.optimizer.learning_rate=0.003",
        f"model.path={model}", "model.init=pretrained", "model.tokenizer=configs/models/tiny_arithmetic",
        "model.dtype=float32", *RUNS[family],
    )  # fmt: skip
    whole, killed, out = tmp_path / "whole", tmp_path / "killed", tmp_path / "out"
    attempts(
        tmp_path, train(whole, *settings), killed_at(killed, 2, "update_actor", 1, *settings), train(killed, *settings)
    )
    assert_same_run(whole, killed, 3)
    lines = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    # transformers generates the samples, and its log-probabilities agree with those of the trainer.
    assert all(0 < line["mismatch/max"] < 1e-4 and line["actor/updates"] > 0 for line in lines)
    export_run(str(killed), str(out))
    assert_same_tensors(load_file(killed / "final/model.safetensors"), load_file(out / "model.safetensors"))
    logits = [logits_of(folder, mtp) for folder in (model, killed / "final", out)]
    assert torch.equal(logits[1], logits[2]) and not torch.allclose(logits[0], logits[1], atol=1e-2)
    if mtp:
        left = load_file(out / "model.safetensors")
        assert all(torch.equal(left[name], tensor) for name, tensor in mtp.items())
        assert_mtp_layers_are_checked(killed, model, mtp, settings if family == "glm4_moe" else ())


def assert_mtp_layers_are_checked(
    run: Path, model: Path, mtp: Mapping[str, torch.Tensor], resume_settings: Sequence[str]
) -> None:
    """Check that an export with changed multi-token prediction layers is refused, and that an export without these
    layers needs `--without-mtp`. If `resume_settings` is not empty, a run with changed layers is refused as well."""
    path, out = model / "model.safetensors", model.parent / "later"
    tensors, name = load_file(path), max(mtp)
    save_file(tensors | {name: -tensors[name]}, path, metadata={"format": "pt"})
    if resume_settings:
        output = attempts(model.parent, train(run, *resume_settings, expect="2"))
        assert "the weights of the actor's further layers are not those the run began with" in output
    with pytest.raises(ValueError, match=r"prediction layers in .* differ from the start .*\(--without-mtp\)"):
        export_run(str(run), str(out))
    path.unlink()
    with pytest.raises(ValueError, match=r"prediction layers are only in .* has no model\.safetensors; .*--w"):
        export_run(str(run), str(out))
    assert main(["export", str(run), str(out), "--without-mtp"]) == 0
    assert not load_file(out / "model.safetensors").keys() & mtp.keys()
    config = json.loads((out / "config.json").read_text())
    assert {config[count] for count in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if count in config} <= {0}


def logits_of(folder: Path, mtp: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of transformers for a folder. All tensors except those of multi-token prediction layers must
    belong to the model."""
    exact: dict[str, Any] = {"attn_implementation": "eager", "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(folder, **exact)
    behind = tuple(name[: name.rindex(".eh_proj.") + 1] for name in mtp if name.endswith(".eh_proj.weight"))
    info["unexpected_keys"] = {name for name in info["unexpected_keys"] if not name.startswith(behind)}
    assert not any(info.values()), info
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(2, 14)[None]).logits
    return logits
