"""Complete runs of a model with experts: training, export, a kill, and other layouts."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megappo.checkpoint.export import export_run
from tests.runs.test_resume import (
    assert_same_run,
    assert_same_tensors,
    attempts,
    killed_at,
    train,
    whole_tensors,
)
from tests.support.models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.waits]


@pytest.mark.exhaustive
def test_run_with_experts_resumes_on_other_layouts(tmp_path: Path) -> None:
    """The actor splits its experts across data replicas, the critic across tensor parallel ranks. `layouts` lists the
    other layouts. Responses of a stopped rollout are saved with their routing, and the resumed run replays this
    routing."""
    model = write_model(tmp_path / "model", "qwen3_moe", 3, vocab_size=16, num_hidden_layers=2)
    settings = (
        "run.steps=3", "checkpoint.every_steps=1", "evaluation=null", f"model.path={model}", "checkpoint.keep_last=9",
        "rollout.generate_batch_sequences=2",
        "model.init=pretrained", "model.tokenizer=configs/models/tiny_arithmetic", "model.dtype=float32",
        "actor.layout={expert_parallel: 2}", "actor.optimizer.distributed=true",
        "critic.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
    )  # fmt: skip
    killed = tmp_path / "killed"
    stop = {"rank": 1, "step": 3, "at": "token", "signal": "SIGUSR1", "stall": "rollout"}
    attempts(
        tmp_path,
        train(tmp_path / "whole", *settings),
        killed_at(killed, 2, "update_actor", 1, *settings),
        train(killed, *settings, "rollout.when_stopped=keep", expect="85", kill=stop),
        train(killed, *settings),
    )
    unfinished = [torch.load(p)[3] for p in killed.glob("checkpoints/step-000002/responses-*.pt")]
    assert any(len(part["routing"]) == part["routed_B"].sum() > 0 for part in unfinished)
    assert_same_run(tmp_path / "whole", killed, 3)
    lines = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    # The fused experts of the embedded engine have the same weights as the separate experts of the trainer.
    assert all(0 < line["mismatch/max"] < 1e-4 and math.isfinite(line["actor/loss"]) for line in lines)
    # Every token except the last token of each sample has the experts of the engine.
    assert all(0.5 < line["mismatch/router_replayed"] < 1 and line["actor/experts_max_load"] > 1 for line in lines)
    export_run(str(killed), str(tmp_path / "out"))
    final, exported = (load_file(f / "model.safetensors") for f in (killed / "final", tmp_path / "out"))
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in final
    assert_same_tensors(final, exported)
    layouts = {
        "one": (1, "actor.layout={}", "critic.layout={expert_parallel: 1}"),
        "turned": (2, "actor.layout={tensor_parallel: 2, sequence_parallel: true}", "critic.layout={}"),
        "pp": (2, "actor.layout={pipeline_parallel: 2}", "critic.layout={expert_parallel: 2}"),
    }
    again = []
    for name, (processes, *layout) in layouts.items():
        shutil.copytree(killed, tmp_path / name)
        attempt = train(tmp_path / name, *settings, *layout, processes=processes)
        again.append({**attempt, "arguments": attempt["arguments"][1:], "rewrite": True})
    attempts(tmp_path, *again)
    before = whole_tensors(killed / "checkpoints/step-000003")
    assert "actor.exp_avg_sq.model.layers.0.mlp.experts.5.up_proj.weight" in before
    for name in layouts:
        assert_same_tensors(before, whole_tensors(tmp_path / name / "checkpoints/step-000003"))


def test_routing_replay_reduces_the_mismatch(tmp_path: Path) -> None:
    """The samples of both runs are equal. The engine in bfloat16 selects other experts for some tokens than the
    trainer in float32."""
    model = write_model(tmp_path / "model", "qwen3_moe", 3, vocab_size=16)
    settings = (
        "run.steps=1", "evaluation=null", f"model.path={model}", "model.init=pretrained", "checkpoint=null",
        "model.tokenizer=configs/models/tiny_arithmetic", "model.dtype=float32", "rollout.dtype=bfloat16",
        "actor.layout={}", "critic=null", "algorithm.estimator=grpo", "rollout.samples_per_prompt=4",
    )  # fmt: skip
    runs = {name: tmp_path / name for name in ("null", "false")}
    attempts(tmp_path, *(train(run, *settings, f"algorithm.router_replay={name}") for name, run in runs.items()))
    replayed, own = (json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in runs.values())
    assert replayed["response/length"] == own["response/length"] and "mismatch/router_changed" not in own
    assert replayed["mismatch/router_changed"] > 0.005
    assert own["mismatch/max"] > 3 * replayed["mismatch/max"], (own, replayed)
