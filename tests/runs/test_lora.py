"""Runs that train adapters: killed and resumed, their reference without weights of its own, exported, started from.

That a step of theirs is exact in every layout is in test_conformance.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megappo.checkpoint.export import export_run
from megappo.config.model_files import read_architecture
from megappo.families import FAMILIES
from megappo.families.adapters import target_names
from megappo.observe.metrics import read_metrics
from tests.runs.test_resume import whole_tensors
from tests.support.adapters import PREFIX, write_adapters
from tests.support.attempts import assert_same_run, attempts, killed_at, timeless, train
from tests.support.checkpoint_bytes import written_and_planned_bytes
from tests.support.harness import ask, start
from tests.support.models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.waits]

ADAPTED = tuple(name for name, family in FAMILIES.items() if family.adapted)
STILL = ("actor.optimizer.learning_rate=1e-30", "critic.optimizer.learning_rate=1e-30")
LORA = "{rank: 4, alpha: 8}"
OWN, SHARED = "reference={}", "reference={share_actor_base: true}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two steps with adapters on actor (TP 2 with SP) and critic (two replicas), in bfloat16 and off the
    device while they rest: `whole` and `killed`, and one with a reference of its own, `own`.

    Then `again` starts from the actor of `whole` and `peft` from a PEFT folder, on other layouts and learning nothing;
    others are refused.
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
        root,
        train(root / "whole", *rounded, SHARED),
        train(root / "own", *rounded, OWN),
        killed_at(root / "killed", 2, "update_actor", 1, *rounded, SHARED),
        train(root / "killed", *rounded, SHARED),
        train(root / "again", *exact, *pp, f"actor.start_from={root / 'whole'}"),
        train(root / "peft", *exact, *pp, f"actor.start_from={root / 'adapters'}"),
        refused("refused", "actor.lora=null", OWN, f"actor.start_from={root / 'whole'}"),
        refused("refused", f"actor.start_from={model}"),
        refused("refused", "actor.lora={rank: 2, alpha: 8}", f"actor.start_from={root / 'whole'}"),
        refused("again", *pp, "actor.lora=null", OWN, "run.force_resume=true"),
    )
    shutil.copytree(root / "again", root / "moved")
    write_model(root / "model", "qwen3", 4, vocab_size=17, tie_word_embeddings=True)
    output += attempts(root, refused("moved", *pp, f"actor.start_from={root / 'whole'}"))
    write_model(root / "model", "qwen3", 3, vocab_size=17, tie_word_embeddings=True)
    (root / "output").write_text(output)
    return root


@pytest.mark.parametrize("family", ADAPTED)
def test_every_matrix_of_every_family(family: str, tmp_path: Path) -> None:
    """With adapters on one kind of matrix, and on all, whose B are not small: log-probabilities, gradients, and the
    weights that engines get and exports hold are those of PEFT's formula W + scale B A; so they are after a step."""
    folder = write_model(tmp_path / "model", family, 3, num_hidden_layers=2)
    targets = target_names(read_architecture(folder))
    kinds = {"all": targets, **{name: (name,) for name in targets}}
    adapters = {
        name: str(write_adapters(tmp_path / name, folder, rank=3, alpha=6, seed=4, targets=chosen, b_std=0.5))
        for name, chosen in kinds.items()
    }
    found = ask("adapters_worker.py", 1, {"folder": str(folder), "adapters": adapters})
    assert found.keys() == kinds.keys()
    for name, errors in found.items():
        assert errors.pop("moved") > 0.1 and errors.pop("stepped") > 1e-3, f"{name}: {errors}"
        assert max(errors.values()) < 1e-5, f"{name}: {errors}"


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_an_engine_computes_what_adapters_have_learned(family: str, tmp_path: Path) -> None:
    """Gemma's, which begin at B = 0, where a norm before or behind them is the same."""
    model = write_model(tmp_path / "model", family, 3, vocab_size=16, num_hidden_layers=2)
    settings = (
        "run.steps=3", "checkpoint=null", "evaluation=null", "actor.optimizer.learning_rate=0.01", f"actor.lora={LORA}",
        f"model.path={model}", "model.init=pretrained", "model.tokenizer=configs/models/tiny_arithmetic",
        "model.dtype=float32", "actor.layout={tensor_parallel: 2, sequence_parallel: true}",
    )  # fmt: skip
    attempts(tmp_path, train(tmp_path / "run", *settings))
    steps = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if line["step"]]
    assert len(steps) == 3 and all(line["mismatch/max"] < 1e-4 for line in steps), steps


def test_a_killed_run_goes_on_to_the_last_bit(world: Path) -> None:
    assert_same_run(world / "whole", world / "killed", 2)


def test_a_reference_without_weights_of_its_own_is_the_base_to_the_last_bit(world: Path) -> None:
    """The whole run is the one whose reference is a second copy of the model."""
    assert timeless(world / "whole/metrics.jsonl") == timeless(world / "own/metrics.jsonl")
    assert timeless(world / "whole/metrics.jsonl")[-1]["kl/mean"] != 0
    finals = [(world / run / "final/model.safetensors").read_bytes() for run in ("whole", "own")]
    assert finals[0] == finals[1]


def test_checkpoints_hold_adapters_alone(world: Path) -> None:
    stored = whole_tensors(world / "whole/checkpoints/step-000002")
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    heads = {f"critic.{kind}.value_head.{name}" for kind in kinds for name in ("weight", "bias")}
    assert {name for name in stored if ".lora_" not in name} == heads
    assert {name.split(".")[1] for name in stored} == set(kinds)
    written, planned = written_and_planned_bytes(world / "whole", 2, ranks=2)
    assert written == planned


def test_the_base_stays_as_it_was(world: Path) -> None:
    """What the engine and the export get is merged anew each time."""
    base, final = (load_file(world / f / "model.safetensors") for f in ("model", "whole/final"))
    for name, tensor in final.items():
        is_adapted = name.removesuffix(".weight").endswith("_proj")
        assert torch.equal(tensor, base[name].bfloat16()) != is_adapted, name


def test_exports_are_the_final_model_and_a_folder_of_peft(world: Path, tmp_path: Path) -> None:
    export_run(str(world / "whole"), str(tmp_path / "merged"))
    final = load_file(world / "whole/final/model.safetensors")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert merged.keys() == final.keys()
    for name, tensor in final.items():  # each rounded once, of sums in another order
        torch.testing.assert_close(merged[name], tensor, rtol=2**-7, atol=1e-6)
    export_run(str(world / "peft"), str(tmp_path / "peft"), form="peft")
    given, exported = (load_file(f / "adapter_model.safetensors") for f in (world / "adapters", tmp_path / "peft"))
    assert given.keys() == exported.keys() and all(torch.equal(given[name], exported[name]) for name in given)
    tokens = torch.arange(1, 12)[None]
    logits = []
    for folder, adapters in ((world / "model", tmp_path / "peft"), (world / "peft/final", None)):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits.append((PeftModel.from_pretrained(model, adapters) if adapters else model)(input_ids=tokens).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-4
    export_run(str(world / "peft"), str(tmp_path / "critic"), "critic")
    assert "score.weight" in load_file(tmp_path / "critic/model.safetensors")


def test_a_run_starts_from_the_adapters_of_another(world: Path, tmp_path: Path) -> None:
    """On another layout; it learns nothing."""
    stored = [whole_tensors(world / run) for run in ("whole/checkpoints/step-000002", "again/checkpoints/step-000001")]
    names = [name for name in stored[0] if name.startswith("actor.weight.")]
    assert len(names) == 4 * 2 * 5 + 4 * 2  # of q, k and v B are one
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in names)


def test_what_cannot_be_is_said(world: Path, tmp_path: Path) -> None:
    said = (world / "output").read_text()
    assert "its actor has only adapters, but without actor.lora all weights are trained" in said
    assert "it contains whole weights, but actor.lora trains adapters of the model that the settings name" in said
    assert "its adapters are {" in said and "actor.lora requires {" in said
    assert "so its checkpoints contain other tensors; set it back, or choose another run.directory" in said
    assert "the weights of the actor's base are not those the run began with" in said
    assert "megappo/commands/train.py" not in said  # no traceback of ours
    with pytest.raises(ValueError, match=r"a PEFT folder cannot contain the value head of a critic"):
        export_run(str(world / "whole"), str(tmp_path / "critic"), "critic", form="peft")
    marker = world / "moved/checkpoints/step-000001/checkpoint.json"
    assert "actor's base" in json.loads(marker.read_text())["body"]["content"]["identity"]
    assert PREFIX not in said


@pytest.mark.learning
@pytest.mark.timeout(5400)
def test_smollm2_learns_sums_with_adapters(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Adapters of rank 16 beside both models, in one process of one thread. What was sampled in the last five steps,
    and greedy answers to all sums, are right nine times in ten; before, greedy ones were half the time."""
    model = request.config.getoption("smollm2")
    if model is None:
        pytest.skip("give SmolLM2-135M-Instruct's folder as --smollm2 FOLDER")
    roles = (
        f"{role}.{setting}"
        for role in ("actor", "critic")
        for setting in (
            "layout={}", "lora={rank: 16, alpha: 32}", "optimizer.learning_rate=5.0e-4", "optimizer.schedule=cosine"
        )
    )  # fmt: skip
    words = ["train", "configs/smollm2_arithmetic.yaml", f"model.path={model}", f"run.directory={tmp_path / 'run'}"]
    words += [*roles, "rollout.max_response_tokens=12", "runtime.threads_per_rank=1"]
    done = start("megappo", *words, processes=0, timeout_seconds=5300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    sampled = [line["reward/mean"] for line in lines if "reward/mean" in line]
    greedy = [line["eval/reward_mean"] for line in lines if "eval/reward_mean" in line]
    assert sum(sampled[-5:]) / 5 >= 0.9 > 0.5 > sampled[0], sampled
    assert greedy[-1] >= 0.9 > 0.6 > greedy[0], greedy
