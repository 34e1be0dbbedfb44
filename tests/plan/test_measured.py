"""Formulas of the planner compared with real Megatron models. Parameters must be equal, and bytes equal within five
percent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from megappo.config import load_config
from megappo.plan.bytes.activations import activation_bytes, layer_bytes_per_token, layers_in_flight
from megappo.plan.bytes.memory import role_memory
from megappo.plan.inputs import RoleSetup, Workload, make_setup
from megappo.plan.planner import read_models
from tests.support.harness import run_worker

pytestmark = [pytest.mark.slow, pytest.mark.waits]

PROMPT, RESPONSE, SAMPLES = 12, 20, 8
TP2, PP2, PP3 = "layout.tensor_parallel=2", "layout.pipeline_parallel=2", "layout.pipeline_parallel=3"
BOTH = ("actor", "critic")
ONE_MICROBATCH = [f"{role}.microbatch_budget_tokens={SAMPLES * (PROMPT + RESPONSE)}" for role in BOTH]
# The model, the number of processes, and the overrides of `base_config`.
CASES: dict[str, tuple[str, int, list[str]]] = {
    "tp2-pp2": ("qwen3", 2, [f"actor.{TP2}", f"critic.{PP2}", *ONE_MICROBATCH]),
    "sp": ("qwen3", 2, [f"{r}.{x}" for r in BOTH for x in (TP2, "layout.sequence_parallel=true")] + ONE_MICROBATCH),
    "selective-full": ("qwen2-tied", 2, [
        f"actor.{PP2}", f"critic.{TP2}", "actor.recompute=full", "critic.recompute=selective", "model.dtype=float32",
        *ONE_MICROBATCH,
    ]),
    "distributed": ("llama", 2, [f"{r}.optimizer.distributed=true" for r in BOTH] + ONE_MICROBATCH),
    "distributed-float32": ("llama", 2, ["model.dtype=float32", "actor.optimizer.distributed=true", *ONE_MICROBATCH]),
    "frozen": ("llama", 2, [
        f"critic.{TP2}", "critic.freeze=[attention, embeddings]", "actor.layout.ranks=1", *ONE_MICROBATCH,
    ]),
    "apart": ("llama", 2, ["actor.layout.ranks=1", "critic.layout.first_rank=1", *ONE_MICROBATCH]),
    "in-flight": ("qwen3", 2, [f"actor.{PP2}", "actor.layout.deallocate_pipeline_outputs=false", f"critic.{PP2}",
        "critic.layout.virtual_pipeline_chunks=2",
        *(f"{role}.microbatch_budget_tokens={2 * (PROMPT + RESPONSE)}" for role in BOTH)]),
    "uneven": ("qwen3", 3, [
        f"actor.{PP3}", f"critic.{PP3}", "critic.layout.pipeline_layers=[2, 1, 1]", *ONE_MICROBATCH,
    ]),
    "uneven-in-flight": ("qwen3-five", 2, [f"actor.{PP2}", "actor.layout.pipeline_layers=[2, 3]", f"critic.{PP2}",
        "critic.layout.virtual_pipeline_chunks=2", "critic.layout.pipeline_layers=[1, 1, 2, 1]",
        *(f"{role}.microbatch_budget_tokens={2 * (PROMPT + RESPONSE)}" for role in BOTH)]),
    "experts": ("qwen3_moe", 2, [
        "actor.layout.expert_parallel=2", f"critic.{TP2}", "critic.layout.sequence_parallel=true",
        "critic.layout.expert_parallel=2", "actor.optimizer.distributed=true", *ONE_MICROBATCH,
    ]),
    "sinks": ("gpt_oss", 2, ["actor.layout.expert_parallel=2", f"critic.{TP2}", "critic.layout.sequence_parallel=true",
        "critic.layout.expert_parallel=2", "critic.recompute=selective", *ONE_MICROBATCH]),
    "latents": ("deepseek_v3", 2, [
        *(f"actor.layout.{x}" for x in ("tensor_parallel=2", "sequence_parallel=true", "expert_parallel=2")),
        f"critic.{PP2}", "critic.recompute=selective", *ONE_MICROBATCH,
    ]),
    "context": ("qwen3", 2, [
        *(f"{r}.layout.context_parallel=2" for r in BOTH), "critic.recompute=selective", *ONE_MICROBATCH,
    ]),
    "tp2xpp2": ("qwen3-tied", 4, [f"{r}.{x}" for r in BOTH for x in (TP2, PP2)] + ONE_MICROBATCH),
}  # fmt: skip
LATENTS = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16,
    "v_head_dim": 20, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
PLACES = [(name, role) for name in CASES for role in BOTH]


def write_architecture(root: Path, name: str) -> Path:
    """Write a folder that contains only a config.json."""
    family, _, change = name.partition("-")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 5 if change == "five" else 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 160, "vocab_size": 131,
        "max_position_embeddings": 64, "tie_word_embeddings": change == "tied",
    }  # fmt: skip
    own = {
        "qwen3_moe": experts,
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "deepseek_v3": experts | LATENTS,
    }
    config = AutoConfig.for_model(family, **sizes | own.get(family, {}))
    config.save_pretrained(root / name)
    return root / name


def base_config(folder: Path) -> dict[str, Any]:
    role = {"minibatch_sequences": SAMPLES, "optimizer": {"learning_rate": 1e-3}}
    return {
        "run": {"name": "planned", "steps": 10},
        "model": {"path": str(folder), "init": "random", "tokenizer": "configs/models/tiny_arithmetic"},
        "actor": role,
        "critic": {**role, "value_head_std": 0.1},
        "data": {
            "train": {"source": "megappo.data.arithmetic:sums", "options": {"max_operand": 3}},
            "apply_chat_template": False,
            "max_prompt_tokens": PROMPT,
        },
        "rollout": {"engine": "transformers", "prompts_per_step": SAMPLES, "max_response_tokens": RESPONSE},
        "reward": {"function": "exact"},
        "logging": {"tensorboard": False, "console": "quiet"},
    }


Measured = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one configuration for each model."""
    root = tmp_path_factory.mktemp("plan")
    for model in sorted({model for model, _, _ in CASES.values()}):
        (root / f"{model}.yaml").write_text(yaml.safe_dump(base_config(write_architecture(root, model))))
    return root


@pytest.fixture(scope="module")
def measured(root: Path) -> Measured:
    """Return a function that measures a case once and returns the measurements of each rank for each role."""
    lengths = {"samples": SAMPLES, "sequence_tokens": PROMPT + RESPONSE, "response_tokens": RESPONSE}

    @functools.cache
    def measure(name: str) -> list[dict[str, Any]]:
        model, processes, overrides = CASES[name]
        case = {"config": str(root / f"{model}.yaml"), "overrides": overrides, **lengths}
        results: list[dict[str, Any]] = run_worker("plan_worker.py", processes, case)
        return results

    return measure


def planned(root: Path, name: str, role: str) -> tuple[RoleSetup, Workload]:
    model, processes, overrides = CASES[name]
    config = load_config(root / f"{model}.yaml", overrides)
    setup = make_setup(config, read_models(config, root).models, processes, on_cuda=False)
    setup_of_role = setup.critic if role == "critic" else setup.actor
    assert setup_of_role is not None
    return setup_of_role, setup.work


def forward_bytes(role: RoleSetup, stage: int, work: Workload) -> float:
    """Return `activation_bytes` plus the rows of the head, without the layer that full recomputation rebuilds in
    the backward pass."""
    tokens = role.rank_tokens(work.sequence_tokens)
    total = activation_bytes(role, stage, work)
    if role.recompute == "full":
        total -= layer_bytes_per_token(role, recompute="none", fused=work.on_cuda) * tokens
    if stage == role.grid.pp - 1:
        rows = role.replica_sequences * work.response_tokens / role.grid.cp
        total += rows * role.arch.hidden_size * (4 if role.is_critic else role.dtype_bytes)
    return total


@pytest.mark.parametrize(("name", "role"), PLACES)
def test_memory_matches_megatron(root: Path, measured: Measured, name: str, role: str) -> None:
    setup, work = planned(root, name, role)
    ranks = [(rank, measurement[role]) for rank, measurement in enumerate(measured(name)) if measurement[role]]
    assert [rank for rank, _ in ranks] == list(setup.grid.ranks)
    for rank, measurement in ranks:
        stage = setup.grid.stage_of(rank)
        assert stage is not None
        memory = role_memory(setup, stage, work)
        assert memory.parameters == measurement["parameters"]
        assert memory.weights == measurement["weights"]
        assert memory.gradients == pytest.approx(measurement["gradients"], rel=0.05)
        assert memory.optimizer == pytest.approx(measurement["optimizer"], rel=0.05)


@pytest.mark.parametrize(("name", "role"), [(n, r) for n, r in PLACES if not n.endswith("in-flight")])
def test_activations_match_autograd(root: Path, measured: Measured, name: str, role: str) -> None:
    setup, work = planned(root, name, role)
    assert setup.microbatches(work.sequence_tokens) == 1
    measured_bytes = {rank: measured(name)[rank][role]["activations"] for rank in setup.grid.ranks}
    if setup.arch.experts:  # experts of different ranks get different numbers of tokens
        measured_bytes = dict.fromkeys(measured_bytes, sum(measured_bytes.values()) / len(measured_bytes))
    for rank, actual in measured_bytes.items():
        stage = setup.grid.stage_of(rank)
        assert stage is not None
        planned_bytes = forward_bytes(setup, stage, work)
        if setup.freeze:  # the plan also counts inputs that frozen weights do not need
            assert actual < planned_bytes, rank
        else:
            assert planned_bytes == pytest.approx(actual, rel=0.05), rank


@pytest.mark.parametrize(("name", "role"), PLACES)
def test_layers_in_flight_match_the_schedule(root: Path, measured: Measured, name: str, role: str) -> None:
    setup, work = planned(root, name, role)
    for rank in setup.grid.ranks:
        stage = setup.grid.stage_of(rank)
        assert stage is not None
        expected = layers_in_flight(setup, stage, setup.microbatches(work.sequence_tokens))
        assert measured(name)[rank][role]["layers"] == expected, rank


def test_sent_outputs_remain_unless_freed(root: Path, measured: Measured) -> None:
    """The first stage of the actor keeps sent outputs. A chunk of the critic keeps at most one output."""
    setup, work = planned(root, "in-flight", "actor")
    assert not setup.frees_outputs
    freed = replace(setup, frees_outputs=True)
    outputs = [activation_bytes(setup, stage, work) - activation_bytes(freed, stage, work) for stage in (0, 1)]
    assert outputs == [measured("in-flight")[rank]["actor"]["outputs"] for rank in (0, 1)] and outputs[0] > 0
    setup, work = planned(root, "in-flight", "critic")
    one = setup.microbatch_tokens(work.sequence_tokens) * setup.arch.hidden_size * setup.dtype_bytes
    assert [measured("in-flight")[rank]["critic"]["outputs"] for rank in (0, 1)] == [one, one]
