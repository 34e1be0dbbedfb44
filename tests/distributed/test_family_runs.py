"""A model of each family through a whole run: it learns, is killed and goes on, and transformers loads what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from distributed.attempts import assert_same_run, attempts, killed_at, train
from distributed.models import write_model
from distributed.test_resume import assert_same_tensors
from megappo.commands.export import export_run

# Where nothing is said, the actor has TP2 and the critic PP2.
RUNS: dict[str, tuple[str, ...]] = {
    "mixtral": (
        "actor.layout={expert_parallel: 2}",
        "critic.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
    ),
    "glm4_moe": (
        "actor.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
        "critic.layout={pipeline_parallel: 2}",
    ),
    "gemma2": (),
    "gemma3_text": ("actor.layout={pipeline_parallel: 2}", "critic.layout={tensor_parallel: 2}"),
}


@pytest.mark.parametrize("family", RUNS)
def test_a_run_continues_and_is_exported(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path / "model", family, 3, vocab_size=16, num_hidden_layers=2)
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
    # What the trainer computes is what transformers computes, which samples here.
    assert all(0 < line["mismatch/max"] < 1e-4 and line["actor/updates"] > 0 for line in lines)
    export_run(str(killed), str(out))
    assert_same_tensors(load_file(killed / "final/model.safetensors"), load_file(out / "model.safetensors"))
    logits = [logits_of(folder) for folder in (model, killed / "final", out)]
    assert torch.equal(logits[1], logits[2]) and not torch.allclose(logits[0], logits[1], atol=1e-2)


def logits_of(folder: Path) -> torch.Tensor:
    """What transformers makes of a folder, all of which is the model's."""
    exact: dict[str, Any] = {"attn_implementation": "eager", "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(folder, **exact)
    assert not any(info.values()), info
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(2, 14)[None]).logits
    return found
