"""Runs with adapters or frozen weights: resume after a kill, a reference that shares the base, and export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megappo.api import export
from megappo.checkpoint.exports.export import export_run
from megappo.families import FAMILIES
from megappo.families.adapters import target_names
from megappo.models.model_files import read_architecture
from megappo.observe.metrics import read_metrics
from tests.runs.test_resume import whole_tensors
from tests.support.adapters import PREFIX, write_adapters
from tests.support.attempts import assert_same_run, attempts, killed_at, timeless, train
from tests.support.checkpoint_bytes import written_and_planned_bytes
from tests.support.harness import run_worker, succeed
from tests.support.models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.waits]


ADAPTED = tuple(name for name, family in FAMILIES.items() if family.adapted)
STILL = ("actor.optimizer.learning_rate=1e-30", "critic.optimizer.learning_rate=1e-30")
LORA = "{rank: 4, alpha: 8}"
OWN, SHARED = "reference={}", "reference={share_actor_base: true}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two steps in bfloat16 with adapters on actor (TP 2 with SP) and critic (two replicas), both offloaded.

    The runs are `whole`, `killed`, and `own`, which has a separate copy of the reference. Then `again` starts
    from the actor of `whole`, and `peft` starts from a PEFT folder, on other layouts with a learning rate near
    zero. Other starts are refused.
    """
    root = tmp_path_factory.mktemp("lora")
    model = write_model(root / "model", "qwen3", 3, vocab_size=17, tie_word_embeddings=True)
    write_adapters(root / "adapters", model, rank=4, alpha=8, seed=5)
    base = (
        f"model.path={model}", "model.init=pretrained", "model.tokenizer=configs/models/tiny_arithmetic",
        "checkpoint.every_steps=1", "evaluation=null", "data.validation=null", "algorithm.kl_in_loss={coef: 0.1}",
        f"actor.lora={LORA}", f"critic.lora={LORA}",
    )  # fmt: skip
    rounded = (
        *base, "model.dtype=bfloat16", "algorithm.mismatch_stop_nats=5", "run.steps=2", "actor.offload=true",
        "actor.layout={tensor_parallel: 2, sequence_parallel: true}", "critic.layout={}", "critic.offload=true",
        "critic.optimizer.distributed=true",
    )  # fmt: skip
    exact = (*base, "model.dtype=float32", "run.steps=1", SHARED, *STILL)
    pp = ("actor.layout={pipeline_parallel: 2}", "critic.layout={tensor_parallel: 2}")

    def refused(directory: str, *overrides: str) -> dict[str, Any]:
        return train(root / directory, *exact, *overrides, expect="2")

    output = attempts(
        root, train(root / "whole", *rounded, SHARED), train(root / "own", *rounded, OWN),
        killed_at(root / "killed", 2, "update_actor", 1, *rounded, SHARED), train(root / "killed", *rounded, SHARED),
        train(root / "again", *exact, *pp, f"actor.start_from={root / 'whole'}"),
        train(root / "peft", *exact, *pp, f"actor.start_from={root / 'adapters'}"),
        refused("refused", "actor.lora=null", OWN, f"actor.start_from={root / 'whole'}"),
        refused("refused", f"actor.start_from={model}"),
        refused("refused", "actor.lora={rank: 2, alpha: 8}", f"actor.start_from={root / 'whole'}"),
        refused("again", *pp, "actor.lora=null", OWN, "run.force_resume=true"),
    )  # fmt: skip
    shutil.copytree(root / "again", root / "moved")
    write_model(root / "model", "qwen3", 4, vocab_size=17, tie_word_embeddings=True)
    output += attempts(root, refused("moved", *pp, f"actor.start_from={root / 'whole'}"))
    write_model(root / "model", "qwen3", 3, vocab_size=17, tie_word_embeddings=True)
    (root / "output").write_text(output)
    return root


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_on_every_matrix_of_a_family(family: str, tmp_path: Path) -> None:
    """Adapters are on one kind of matrix or on all kinds, with large B. Log-probabilities, gradients, and the weights
    for engines and exports equal the PEFT formula W + scale B A, also after a step."""
    folder = write_model(tmp_path / "model", family, 3, num_hidden_layers=2)
    targets = target_names(read_architecture(folder))
    kinds = {"all": targets, **{name: (name,) for name in targets}}
    adapters = {
        name: str(write_adapters(tmp_path / name, folder, rank=3, alpha=6, seed=4, targets=chosen, b_std=0.5))
        for name, chosen in kinds.items()
    }
    errors_of_kind = run_worker("adapters_worker.py", 1, {"folder": str(folder), "adapters": adapters})
    assert errors_of_kind.keys() == kinds.keys()
    for name, errors in errors_of_kind.items():
        assert errors.pop("moved") > 0.1 and errors.pop("stepped") > 1e-3, f"{name}: {errors}"
        assert max(errors.values()) < 1e-5, f"{name}: {errors}"


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_engine_and_trainer_agree_on_trained_adapters(family: str, tmp_path: Path) -> None:
    """At the start, the B matrices of Gemma are zero, so the position of the norms has no effect."""
    model = write_model(tmp_path / "model", family, 3, vocab_size=16, num_hidden_layers=2)
    settings = (
        "run.steps=3", "checkpoint=null", "evaluation=null", "actor.optimizer.learning_rate=0.01", f"actor.lora={LORA}",
        f"model.path={model}", "model.init=pretrained", "model.tokenizer=configs/models/tiny_arithmetic",
        "model.dtype=float32", "actor.layout={tensor_parallel: 2, sequence_parallel: true}",
    )  # fmt: skip
    attempts(tmp_path, train(tmp_path / "run", *settings))
    steps = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if line["step"]]
    assert len(steps) == 3 and all(line["mismatch/max"] < 1e-4 for line in steps), steps


def test_killed_run_resumes_bitwise_equal(world: Path) -> None:
    assert_same_run(world / "whole", world / "killed", 2)


def test_shared_reference_equals_a_separate_reference(world: Path) -> None:
    """A run with the shared base equals a run with a second copy of the model as its reference."""
    assert timeless(world / "whole/metrics.jsonl") == timeless(world / "own/metrics.jsonl")
    assert timeless(world / "whole/metrics.jsonl")[-1]["kl/mean"] != 0
    finals = [(world / run / "final/model.safetensors").read_bytes() for run in ("whole", "own")]
    assert finals[0] == finals[1]


def test_checkpoints_contain_only_adapters(world: Path) -> None:
    stored = whole_tensors(world / "whole/checkpoints/step-000002")
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    heads = {f"critic.{kind}.value_head.{name}" for kind in kinds for name in ("weight", "bias")}
    assert {name for name in stored if ".lora_" not in name} == heads
    assert {name.split(".")[1] for name in stored} == set(kinds)
    written, planned = written_and_planned_bytes(world / "whole", 2, ranks=2)
    assert written == planned


def test_base_weights_are_unchanged(world: Path) -> None:
    """The weights for the engine and the export are merged from the base each time."""
    base, final = (load_file(world / f / "model.safetensors") for f in ("model", "whole/final"))
    for name, tensor in final.items():
        is_adapted = name.removesuffix(".weight").endswith("_proj")
        assert torch.equal(tensor, base[name].bfloat16()) != is_adapted, name


def test_exports_of_the_merged_model_and_peft(world: Path, tmp_path: Path) -> None:
    export_run(str(world / "whole"), str(tmp_path / "merged"))
    final = load_file(world / "whole/final/model.safetensors")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert merged.keys() == final.keys()
    for name, tensor in final.items():  # each result is rounded once, from sums in a different order
        torch.testing.assert_close(merged[name], tensor, rtol=2**-7, atol=1e-6)
    export_run(str(world / "peft"), str(tmp_path / "peft"), form="peft")
    original, exported = (load_file(f / "adapter_model.safetensors") for f in (world / "adapters", tmp_path / "peft"))
    assert original.keys() == exported.keys() and all(torch.equal(original[name], exported[name]) for name in original)
    tokens = torch.arange(1, 12)[None]
    logits = []
    for folder, adapters in ((world / "model", tmp_path / "peft"), (world / "peft/final", None)):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits.append((PeftModel.from_pretrained(model, adapters) if adapters else model)(input_ids=tokens).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-4
    export_run(str(world / "peft"), str(tmp_path / "critic"), "critic")
    assert "score.weight" in load_file(tmp_path / "critic/model.safetensors")


def test_run_starts_from_existing_adapters(world: Path, tmp_path: Path) -> None:
    """The new run has another layout and a learning rate near zero."""
    stored = [whole_tensors(world / run) for run in ("whole/checkpoints/step-000002", "again/checkpoints/step-000001")]
    names = [name for name in stored[0] if name.startswith("actor.weight.")]
    assert len(names) == 4 * 2 * 5 + 4 * 2  # q, k and v share one B
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in names)


def test_impossible_starts_and_exports_are_refused(world: Path, tmp_path: Path) -> None:
    output = (world / "output").read_text()
    assert "its actor has only adapters, but without actor.lora all weights are trained" in output
    assert "it contains whole weights, but actor.lora trains adapters of the model that the settings name" in output
    assert "its adapters are {" in output and "actor.lora requires {" in output
    assert "so its checkpoints contain other tensors; set it back, or choose another run.directory" in output
    assert "the weights of the actor's base are not those the run began with" in output
    assert "megappo/commands/train.py" not in output  # no traceback of megappo
    with pytest.raises(ValueError, match=r"a PEFT folder cannot contain the value head of a critic"):
        export_run(str(world / "whole"), str(tmp_path / "critic"), "critic", form="peft")
    marker = world / "moved/checkpoints/step-000001/checkpoint.json"
    assert "actor's base" in json.loads(marker.read_text())["body"]["content"]["identity"]
    assert PREFIX not in output


@pytest.mark.learning
@pytest.mark.timeout(5400)
def test_smollm2_learns_sums_with_adapters(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Both models have adapters of rank 16, in one process with one thread. At least nine of ten samples of the last
    five steps, and of the greedy answers to all sums, are right. Before training, about half of the greedy answers
    are right."""
    model = request.config.getoption("smollm2")
    if model is None:
        pytest.skip("set the folder of SmolLM2-135M-Instruct with --smollm2 FOLDER")
    roles = (
        f"{role}.{setting}"
        for role in ("actor", "critic")
        for setting in (
            "layout={}", "lora={rank: 16, alpha: 32}", "optimizer.learning_rate=5.0e-4", "optimizer.schedule=cosine"
        )
    )  # fmt: skip
    arguments = ["train", "configs/smollm2_arithmetic.yaml", f"model.path={model}", f"run.directory={tmp_path / 'run'}"]
    arguments += [*roles, "rollout.max_response_tokens=12", "runtime.threads_per_rank=1"]
    succeed("megappo", *arguments, processes=0, timeout_seconds=5300)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    sampled = [line["reward/mean"] for line in lines if "reward/mean" in line]
    greedy = [line["eval/reward_mean"] for line in lines if "eval/reward_mean" in line]
    assert sum(sampled[-5:]) / 5 >= 0.9 > 0.5 > sampled[0], sampled
    assert greedy[-1] >= 0.9 > 0.6 > greedy[0], greedy


FREEZE = "critic.freeze=[attention, embeddings]"


def test_frozen_weights_are_bitwise_equal_after_ten_steps(tmp_path: Path) -> None:
    """The critic has two updates per update of the actor, in bfloat16, with weight decay and a clipped norm. Two data
    replicas share a distributed optimizer. Checkpoints contain moments only of the trained weights."""
    model = write_model(tmp_path / "model", "llama", 3, vocab_size=16)
    settings = (
        "run.steps=10", "checkpoint.every_steps=10", f"model.path={model}", "model.init=pretrained",
        "model.dtype=bfloat16", "model.tokenizer=configs/models/tiny_arithmetic", "actor.layout={}",
        "critic.layout={}", "critic.epochs=2", "evaluation=null", "algorithm.mismatch_stop_nats=5", FREEZE,
        "critic.optimizer={learning_rate: 0.01, weight_decay: 0.1, distributed: true}",
    )  # fmt: skip
    run = tmp_path / "run"
    attempts(tmp_path, train(run, *settings))
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["critic/updates"] for line in lines] == [4.0] * 10 and lines[-1]["actor/updates"] == 2
    export(run, tmp_path / "critic", role="critic")
    initial, trained = (load_file(next(folder.glob("*.safetensors"))) for folder in (model, tmp_path / "critic"))
    frozen = {name for name in initial if "self_attn" in name or "embed_tokens" in name}
    assert len(frozen) == 4 * 4 + 1 and frozen < trained.keys()
    for name in initial.keys() & trained.keys():
        assert torch.equal(initial[name].bfloat16(), trained[name].bfloat16()) == (name in frozen), name
    keys = dcp.FileSystemReader(run / "checkpoints" / "step-000010").read_metadata().state_dict_metadata
    moments = {key for key in keys if key.startswith("critic.") and "exp_avg" in key}
    assert moments and not [key for key in moments if "attn" in key or "q_proj" in key or "embed" in key]
    written, planned = written_and_planned_bytes(run, 10, ranks=2)
    assert written == planned


@pytest.mark.learning
def test_learning_with_a_partly_frozen_critic(tmp_path: Path) -> None:
    """The quickstart learns its sums within 200 steps, although the attention layers of its critic keep their random
    weights."""
    arguments = ("train", "configs/quickstart.yaml", f"run.directory={tmp_path / 'run'}", "critic.freeze=attention",
             "run.steps=200", "evaluation=null")  # fmt: skip
    succeed("megappo", *arguments, processes=2, timeout_seconds=590)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum(line["reward/mean"] for line in lines[-5:]) / 5 > 0.9
