"""Simulated ranks of the shipped configurations, and of 1,024 ranks: models and memory match `megappo plan`."""

from __future__ import annotations

import random
import time
from functools import cache
from pathlib import Path

import pytest
from megatron.core.optimizer import MegatronOptimizer

from megappo.config import Config, load_config
from megappo.config.derive import derive_run
from megappo.families.flops import sample_cost
from megappo.megatron.optimizer.optimization import RoleOptimizer
from megappo.megatron.packing import plan_microbatches
from megappo.megatron.roles import LocalRole, Role, TrainedRole
from megappo.plan.bytes.memory import role_memory
from megappo.plan.inputs import RoleSetup, Setup, make_setup
from megappo.plan.planner import read_models
from megappo.ppo.assembly.models import ModelBuilder
from tests.support.configurations import CONFIGURATIONS, trainer_ranks
from tests.support.fake_world import without_memory
from tests.support.places import ROOT
from tests.support.quick import cases

LARGE, LARGE_WORLD = ROOT / "configs" / "qwen3_235b_a22b_16node_dapo_math.yaml", 1024
WORLDS = {path.stem: (path, trainer_ranks(path)) for path in CONFIGURATIONS} | {"1024": (LARGE, LARGE_WORLD)}
DENSE = ("qwen3_8b_8gpu_math",)
SAMPLES, PLAN_SECONDS = 8192, 2.0


@cache
def settings(path: Path, *more: str) -> Config:
    """Load a configuration with random weights. Models of a hub use a local config.json, as in the plan. Offloading is
    disabled, because simulated tensors have no bytes."""
    raw = load_config(path)
    named = {"model": raw.model, "critic": raw.critic, "reference": raw.reference}
    overrides = [
        f"{section}.path={local}"
        for section, part in named.items()
        if part is not None and part.path is not None
        if (local := ROOT / "configs" / "models" / Path(part.path).name).is_dir()
    ]
    overrides += [f"{role}.offload=false" for role in raw.trained]
    overrides += (
        ["model.dtype=bfloat16"] if raw.rollout.servers is not None else []
    )  # SGLang does not support float32 on GPUs
    return load_config(path, [*overrides, "model.init=random", "run.epochs=null", "run.steps=100", *more])


def planned(config: Config, world: int) -> Setup:
    return make_setup(config, read_models(config, None).models, world, on_cuda=True)


def on_rank(config: Config, rank: int, world: int) -> dict[str, Role]:
    """Return the roles that a run builds on this rank, without memory."""
    with without_memory(rank, world) as runtime:
        builder = ModelBuilder(config, derive_run(config, world), runtime)
        actor = builder.actor()
        roles = {"actor": actor, "reference": builder.reference(actor), "critic": builder.critic()}
        return {name: role for name, role in roles.items() if role is not None}


def gradient_bytes(optimizer: RoleOptimizer) -> int:
    buffers = [b for chunk in optimizer.chunks for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    return sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in buffers)


def optimizer_bytes(megatron: MegatronOptimizer, dtype_bytes: int) -> int:
    """Return the bytes of the two moments of AdamW and of separate main weights, for the weights that this rank
    updates."""
    parts = getattr(megatron, "chained_optimizers", [megatron])
    updated = sum(p.numel() for part in parts for group in part.param_groups for p in group["params"])
    return (12 if dtype_bytes == 2 else 8) * updated


def check(role: Role, setup: RoleSetup, work: Setup) -> None:
    if not isinstance(role, LocalRole):
        return
    memory = role_memory(setup, role.layout.stage, work.work)
    parameters = [p for chunk in role.model.chunks for p in chunk.parameters()]
    assert sum(p.numel() for p in parameters) == memory.parameters
    assert sum(p.numel() * p.element_size() for p in parameters) == memory.weights
    assert isinstance(role, TrainedRole) == setup.trained
    if isinstance(role, TrainedRole):
        # Megatron pads each buffer, so that all ranks have equal parts that start at multiples of 256 bytes.
        assert memory.gradients == pytest.approx(gradient_bytes(role.optimizer), rel=1e-4)
        assert memory.optimizer == pytest.approx(optimizer_bytes(role.optimizer.megatron, setup.dtype_bytes), rel=1e-4)


@pytest.mark.parametrize("name", cases(WORLDS, quick=DENSE))
def test_models_of_ranks_match_the_plan(name: str) -> None:
    """The first and the last rank are tested, and a rank of a middle pipeline stage."""
    path, world = WORLDS[name]
    config = settings(path)
    setup = planned(config, world)
    between = {world // 2} if any(role.grid.pp > 2 for role in setup.roles) else set()
    for rank in sorted({0, world - 1} | between):
        roles = on_rank(config, rank, world)
        assert roles.keys() == {role.name for role in setup.roles}
        for role in setup.roles:
            check(roles[role.name], role, setup)


LORA = "lora={rank: 16, alpha: 32}"


@pytest.mark.parametrize("name", cases(["qwen3_8b_8gpu_math", "qwen3_30b_a3b_4node_math"], quick=DENSE))
def test_adapters_match_the_plan_and_use_little_memory(name: str) -> None:
    """Gradients and optimizer state use less than 5% of the bytes of full training."""
    path, world = WORLDS[name]
    plain = settings(path)
    adapted = settings(path, *(f"{role}.{LORA}" for role in plain.trained))
    bytes_of = []
    for config in (plain, adapted):
        setup, roles = planned(config, world), on_rank(config, 0, world)
        for role in setup.roles:
            check(roles[role.name], role, setup)
        actor = roles["actor"]
        assert isinstance(actor, TrainedRole)
        width = setup.actor.dtype_bytes
        bytes_of.append((gradient_bytes(actor.optimizer), optimizer_bytes(actor.optimizer.megatron, width)))
    assert all(few < 0.05 * many for many, few in zip(*bytes_of, strict=True)), bytes_of


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param("qwen3_8b_8gpu_math", ["critic.freeze=[attention, embeddings]"], marks=pytest.mark.quick),
        ("qwen3_8b_8gpu_math", ["critic.freeze=[attention, 'model.layers.1?.mlp.down_proj.*']", f"critic.{LORA}"]),
        (
            "qwen3_30b_a3b_4node_math",
            ["critic.path=null", "critic.freeze=['model.layers.*.mlp.experts.*', model.norm.weight]"],
        ),
    ],
)
def test_frozen_weights_have_no_gradients_and_no_state(name: str, overrides: list[str]) -> None:
    """The memory matches the plan on the first and the last rank, and is smaller than without frozen weights. This
    includes a pattern for experts, and frozen weights with adapters."""
    path, world = WORLDS[name]
    free = [text for text in overrides if not text.startswith("critic.freeze")]
    for rank in (0, world - 1)[: 1 if "a3b" in name else 2]:
        bytes_of = []
        for changes in (free, overrides):
            config = settings(path, *changes)
            setup, critic = planned(config, world), on_rank(config, rank, world)["critic"]
            check(critic, next(role for role in setup.roles if role.name == "critic"), setup)
            assert isinstance(critic, TrainedRole)
            width = setup.actor.dtype_bytes
            bytes_of.append((gradient_bytes(critic.optimizer), optimizer_bytes(critic.optimizer.megatron, width)))
        assert all(few < 0.9 * many for many, few in zip(*bytes_of, strict=True)), bytes_of


@pytest.mark.parametrize("name", WORLDS)
def test_microbatches_match_the_plan(name: str) -> None:
    """All samples of the minibatch have the maximum length."""
    path, world = WORLDS[name]
    setup = planned(settings(path), world)
    for role in setup.trained:
        tokens = setup.work.sequence_tokens
        plan = plan_microbatches(
            dict.fromkeys(range(role.minibatch_sequences), role.grid.padded(tokens)),
            cost=sample_cost(role.arch, is_critic=role.is_critic),
            replicas=role.grid.dp,
            budget_tokens=role.microbatch_budget_tokens,
            multiple_of=role.grid.pp if role.vpp > 1 else 1,
            in_step=role.grid.replicas_in_step,
        )
        assert {len(microbatches) for microbatches in plan.replicas} == {role.microbatches(tokens)}
        largest = max(len(microbatch.sample_ids) for microbatches in plan.replicas for microbatch in microbatches)
        assert largest * role.grid.padded(tokens) <= role.microbatch_tokens(tokens)


def test_thousands_of_samples_are_planned_quickly() -> None:
    config = settings(LARGE)
    start = time.process_time()
    role = planned(config, LARGE_WORLD).actor
    draw = random.Random(1)
    plan = plan_microbatches(
        {i: draw.randint(200, role.microbatch_budget_tokens) for i in range(SAMPLES)},
        cost=sample_cost(role.arch, is_critic=False), replicas=role.grid.dp,
        budget_tokens=role.microbatch_budget_tokens, multiple_of=role.grid.pp, in_step=role.grid.replicas_in_step,
    )  # fmt: skip
    assert len(plan.replica_of()) == SAMPLES
    assert time.process_time() - start < PLAN_SECONDS
