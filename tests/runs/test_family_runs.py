"""A complete run of a model of each family, with a kill, a resume, and an export that transformers loads."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megappo.checkpoint.exports.export import export_run
from megappo.cli import main
from megappo.ppo.rollout.in_flight_state import KEY
from tests.runs.test_resume import assert_same_tensors, whole_tensors
from tests.support.attempts import assert_same_run, attempts, killed_at, train
from tests.support.models import add_mtp_layers, write_model
from tests.support.quick import cases

pytestmark = [pytest.mark.slow, pytest.mark.waits]


# The default layouts are TP2 of the actor and PP2 of the critic.
RUNS: dict[str, tuple[str, ...]] = {
    "mixtral": ("actor.layout={expert_parallel: 2}",
        "critic.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}"),
    "glm4_moe": ("actor.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
        "critic.layout={pipeline_parallel: 2}"),
    "gpt_oss": ("actor.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
        "critic.layout={pipeline_parallel: 2}"),
    "deepseek_v3": ("actor.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
        "critic.layout={pipeline_parallel: 2}"),
    "qwen3_next": ("actor.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
        "critic.layout={pipeline_parallel: 2}"),
    "qwen3_5_text": (),
    "gemma2": (),
    "gemma3_text": ("actor.layout={pipeline_parallel: 2}", "critic.layout={tensor_parallel: 2}"),
    "gemma4_text": ("actor.layout={pipeline_parallel: 2}", "critic.layout={tensor_parallel: 2}"),
}  # fmt: skip


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
        tmp_path, train(tmp_path / "whole", *settings), killed_at(killed, 2, "update_actor", 1, *settings),
        train(killed, *settings, "rollout.when_stopped=keep", expect="85", kill=stop), train(killed, *settings),
    )  # fmt: skip
    unfinished = [torch.load(p)[KEY] for p in killed.glob("checkpoints/step-000002/responses-*.pt")]
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
