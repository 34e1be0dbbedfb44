"""The planner: known sizes, the direction of changes in memory and time, and proposals that fit."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.config import Config, ConfigError, load_config
from megappo.config.pipeline import balanced_layers, even_layers
from megappo.families import FAMILIES
from megappo.observe.timing.throughput import peak_flops, training_flops_per_token
from megappo.plan.bytes.activations import layers_in_flight
from megappo.plan.bytes.elements import stage_parameters
from megappo.plan.bytes.memory import bucket_bytes, engine_memory, sync_bytes
from megappo.plan.bytes.sizes import model_sizes
from megappo.plan.hardware.machine_file import find_machine
from megappo.plan.hardware.machines import MACHINES
from megappo.plan.inputs import Models, RoleSetup, make_setup, workload
from megappo.plan.planner import Plan, fewest_ranks, make_plan, read_models
from megappo.plan.search import Proposal, best_layouts, nearest_fit, remedy
from tests.support.planned import LARGE, MIDDLE, MODELS, ON, PUBLISHED, SMALL, load, models_of, plan

EXPERTS = {"Qwen3-30B-A3B": (30_532_122_624, 3e9), "Qwen3-235B-A22B": (235_093_634_560, 22e9)}
"""Models with experts: all weights, and the weights per token that their model cards report."""


def resident(result: Plan, role: str) -> float:
    return max(r.resident for ranks in result.ranks for r in ranks.roles if r.role == role)


def update(result: Plan, role: str) -> float:
    return max(r.update for ranks in result.ranks for r in ranks.roles if r.role == role)


def seconds(result: Plan, stage: str) -> float:
    return next(s.seconds for s in result.stages if s.name == stage)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_public_models(name: str) -> None:
    arch = read_models(load_config(SMALL, [f"model.path={MODELS / name}"]), MODELS).models.actor
    assert model_sizes(arch)[0] == PUBLISHED[name]
    for tp, pp in ((1, 1), (1, 4), (8, 1), (4, 2)):
        layers = even_layers(arch.layers, pp)
        stages = stage_parameters(arch, tp, layers, arch.vocab_size, False)
        copy = arch.vocab_size * arch.hidden_size if arch.tied_embeddings and pp > 1 else 0
        norms = (2 * arch.hidden_size + 2 * arch.head_dim) * arch.layers + arch.hidden_size
        assert tp * sum(stages) == PUBLISHED[name] + copy + (tp - 1) * norms
        critic = stage_parameters(arch, tp, layers, arch.vocab_size, True)
        head = arch.vocab_size * arch.hidden_size * (pp > 1 if arch.tied_embeddings else 1)
        assert sum(stages) - sum(critic) == head / tp - arch.hidden_size - 1


@pytest.mark.parametrize("name", EXPERTS)
def test_parameters_of_public_models_with_experts(name: str) -> None:
    """Shares of the experts and tensor parallel shares add up to the total, for any ranks."""
    total, active = EXPERTS[name]
    overrides = [f"model.path={MODELS / name}", "critic=null", "algorithm.estimator=reinforce_plus_plus"]
    models = read_models(load_config(LARGE, overrides), MODELS).models
    arch = models.actor
    assert model_sizes(arch)[0] == total
    assert sum(model_sizes(arch)[1:]) == pytest.approx(active, rel=0.1)
    settings = [*overrides, "actor.layout={pipeline_parallel: 2, tensor_parallel: 4, expert_parallel: 8}"]
    role = make_setup(load_config(LARGE, settings), models, 16, on_cuda=True).actor
    shared = sum(role.parameters(stage) - role.expert_parameters(stage) for stage in range(2))
    norms = (
        2 * arch.hidden_size + 2 * arch.head_dim + arch.experts * arch.hidden_size
    ) * arch.layers + arch.hidden_size
    assert 4 * shared - 3 * norms + 8 * 2 * role.expert_parameters(0) == total
    assert role.grid.expert_replicas == 1
    assert [(group[0], group[-1]) for group in role.grid.expert_groups] == [(0, 11), (4, 15)]
    assert [role.grid.expert_owner(stage, 7) for stage in range(2)] == [11, 15]


@pytest.mark.parametrize("layers", ["auto", "[1, 20, 15, 10]"])
def test_dense_layers_are_counted_on_their_stages(layers: str) -> None:
    """In GLM-4.5-Air, as transformers builds the model, the first layer has no experts. Each stage has two chunks of
    one or more layers."""
    path = MODELS / "GLM-4.5-Air"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    per_layer = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    biases = sum(b.numel() for name, b in model.named_buffers() if name.endswith("correction_bias"))
    total = sum(p.numel() for p in model.parameters()) + biases
    layout = f"pipeline_parallel: 2, virtual_pipeline_chunks: 2, expert_parallel: 8, pipeline_layers: {layers}"
    overrides = [f"model.path={path}", "critic=null", "algorithm.estimator=reinforce_plus_plus"]
    config = load_config(LARGE, [*overrides, f"actor.layout={{{layout}}}"])
    models = read_models(config, MODELS).models
    assert model_sizes(models.actor)[0] == total
    assert sum(model_sizes(models.actor)[1:]) == pytest.approx(12e9, rel=0.1)  # as the model card reports
    role = make_setup(config, models, 16, on_cuda=True).actor
    counts = role.chunk_layers or even_layers(46, 4)
    starts = [0, *itertools.accumulate(counts)]
    for stage in range(2):
        layers_of_stage = [n for chunk in (stage, stage + 2) for n in range(starts[chunk], starts[chunk + 1])]
        dense = sum(n == 0 for n in layers_of_stage)
        outside = (151552 * 4096) + (4096 if stage == 1 else 0)
        expected = sum(per_layer[n] for n in layers_of_stage) + 128 * (len(layers_of_stage) - dense) + outside
        shared = role.parameters(stage) - role.expert_parameters(stage)
        assert role.expert_parameters(stage) == (len(layers_of_stage) - dense) * 16 * 3 * 4096 * 1408
        assert shared + 8 * role.expert_parameters(stage) == expected


def test_more_expert_ranks_need_less_memory_and_more_links() -> None:
    overrides = [f"model.path={MODELS / 'Qwen3-30B-A3B'}", "critic=null", "algorithm.estimator=reinforce_plus_plus"]
    models = read_models(load_config(LARGE, overrides), MODELS).models
    plans = []
    for ep in (1, 2, 8, 16):
        layout = f"actor.layout={{tensor_parallel: 4, sequence_parallel: true, expert_parallel: {ep}}}"
        config = load_config(LARGE, [*overrides, layout, "actor.optimizer.distributed=true"])
        plans.append(make_plan(config, models, find_machine("h200"), 16))
    stays = [resident(f, "actor") for f in plans]
    links = [next(s.link_bytes for s in f.stages if s.name == "forward") for f in plans]
    assert stays == sorted(set(stays), reverse=True)
    assert links == sorted(set(links))
    # Gradients and weights are sharded. The state of the optimizer has the same size for any number of expert ranks.
    assert len({round(max(r.optimizer for ranks in f.ranks for r in ranks.roles) / 1e6) for f in plans}) == 1


@pytest.mark.parametrize("path", [SMALL, MIDDLE, LARGE], ids=lambda p: p.stem)
def test_configurations_fit_their_machine(path: Path) -> None:
    start = time.perf_counter()
    name, gpus = ON[path]
    result = make_plan(load_config(path), models_of(path), find_machine(name), gpus)
    assert result.fits, result.verdict
    assert result.verdict.startswith("fits: rank")
    assert result.gpus == fewest_ranks(load_config(path))
    assert result.step_seconds == pytest.approx(sum(s.seconds for s in result.stages))
    assert [s.name for s in result.stages] == ["rollout", "forward", "update_critic", "update_actor", "sync"]
    for ranks in result.ranks:
        assert set(ranks.stages) == {s.name for s in result.stages}
        assert result.fullest.peak >= ranks.peak > sum(r.resident for r in ranks.roles)
    assert sorted(rank for ranks in result.ranks for rank in ranks.ranks) == list(range(result.gpus))
    assert time.perf_counter() - start < 10


def test_tensor_parallelism_reduces_memory_per_rank() -> None:
    plans = [
        plan(MIDDLE, f"actor.layout.tensor_parallel={tp}", "actor.layout.sequence_parallel=false") for tp in (2, 4, 8)
    ]
    for wide, narrow in itertools.pairwise(plans):
        assert resident(narrow, "actor") < resident(wide, "actor")
        assert update(narrow, "actor") < update(wide, "actor")
        assert seconds(narrow, "rollout") == seconds(wide, "rollout")


@pytest.mark.parametrize(
    ("less", "more", "role"),
    [
        ("actor.layout.sequence_parallel=true", "actor.layout.sequence_parallel=false", "actor"),
        ("actor.recompute=full", "actor.recompute=selective", "actor"),
        ("actor.recompute=selective", "actor.recompute=none", "actor"),
        ("critic.microbatch_budget_tokens=4096", "critic.microbatch_budget_tokens=8192", "critic"),
    ],
)
def test_settings_reduce_memory_of_updates(less: str, more: str, role: str) -> None:
    assert update(plan(MIDDLE, less), role) < update(plan(MIDDLE, more), role)


def test_settings_reduce_resident_memory() -> None:
    pipelines = [
        plan(LARGE, "actor.layout.tensor_parallel=4", f"actor.layout.pipeline_parallel={p}") for p in (1, 2, 4)
    ]
    assert resident(pipelines[0], "actor") > resident(pipelines[1], "actor") > resident(pipelines[2], "actor")
    replicas = ["actor.layout.tensor_parallel=2", "actor.optimizer.distributed="]
    sharded, whole = (plan(MIDDLE, replicas[0], replicas[1] + on) for on in ("true", "false"))
    difference = resident(whole, "actor") - resident(sharded, "actor")
    assert difference == pytest.approx(0.75 * 12 * PUBLISHED["Qwen3-8B"] / 2, rel=0.01)
    assert plan(MIDDLE, "reference=null", "algorithm.kl_in_reward=null").fullest.peak < plan(MIDDLE).fullest.peak


def test_engine_memory_follows_batch_and_length() -> None:
    base = plan(MIDDLE).fullest.engine
    assert base.weights == 2 * PUBLISHED["Qwen3-8B"]
    # 2 (keys, values) x 36 layers x 8 heads x 128 channels x 2 bytes x 16 sequences x 4096 tokens
    assert base.kv_cache == 2 * 36 * 8 * 128 * 2 * 16 * 4096
    assert plan(MIDDLE, "rollout.generate_batch_sequences=8").fullest.engine.kv_cache == base.kv_cache / 2
    assert plan(MIDDLE, "rollout.dtype=float32").fullest.engine.weights == 2 * base.weights


def test_engine_memory_by_hand() -> None:
    """Plan Qwen3-8B in bfloat16 with 16 sequences of 4,096 tokens, including 1,024 prompt tokens."""
    engine = plan(MIDDLE, "rollout.engine=transformers", "rollout.generate_batch_sequences=16").fullest.engine
    one_layer = 2 * 2 * 16 * 4096 * 8 * 128
    repeated = 2 * 2 * 16 * 4096 * 32 * 128  # for every query head
    widest = 2 * 16 * 1024 * (3 * 12288 + 2 * 4096)
    logits = 16 * 151936 * (2 + 3 * 4)
    assert widest > logits
    assert engine.workspace == one_layer + repeated + widest
    assert engine.total == engine.weights + engine.kv_cache + engine.workspace
    assert engine.idle == engine.syncing == engine.weights
    short = plan(
        MIDDLE, "rollout.engine=transformers", "rollout.generate_batch_sequences=16", "data.max_prompt_tokens=16"
    ).fullest.engine
    assert short.workspace == (one_layer + repeated) * (16 + 3072) / 4096 + logits
    heads = dataclasses.replace(models_of(MIDDLE).actor, kv_heads=32)  # no head is repeated
    work = workload(load_config(MIDDLE, ["rollout.generate_batch_sequences=16"]), 8, on_cuda=True)
    assert engine_memory(heads, work).workspace == 2 * 2 * 16 * 4096 * 32 * 128 + widest


def test_buckets_by_hand() -> None:
    """The embedded engine needs two buckets. SGLang needs three buckets, and the experts of a layer for comparison."""
    embedding = 2 * 151936 * 4096
    embedded = ["rollout.engine=transformers"]
    assert plan(MIDDLE, *embedded).fullest.sync == 2 * embedding
    assert plan(MIDDLE, *embedded, f"rollout.sync_bucket_bytes={10**10}").fullest.sync == 2 * 10**10
    assert plan(MIDDLE, *embedded, f"rollout.sync_bucket_bytes={10**12}").fullest.sync == 2 * 2 * PUBLISHED["Qwen3-8B"]
    base = plan(MIDDLE, "rollout.servers={tensor_parallel: 1}", "actor.layout.tensor_parallel=4").fullest.sync
    assert base == 3 * embedding
    config = load_config(MIDDLE, ["rollout.servers={tensor_parallel: 1}"])
    setup = make_setup(config, models_of(MIDDLE), 8, on_cuda=True, device_bytes=80e9)
    arch = dataclasses.replace(setup.actor.arch, experts=4, declaration=FAMILIES["qwen3_moe"])
    waiting = 2 * 4 * 3 * 12288 * 4096
    with_experts = dataclasses.replace(setup, actor=dataclasses.replace(setup.actor, arch=arch))
    assert sync_bytes(with_experts) == 3 * bucket_bytes(with_experts) + waiting


def test_evaluation_and_reward_model_take_memory(tmp_path: Path) -> None:
    base = plan(MIDDLE).fullest
    longer = plan(MIDDLE, "evaluation.max_response_tokens=7168").fullest
    assert longer.engine.kv_cache == 2 * base.engine.kv_cache
    save_file({"score": torch.zeros(3, 5), "trunk": torch.zeros(7)}, tmp_path / "model.safetensors")
    with_model = plan(MIDDLE, "reward.function=model", f"reward.model_path={tmp_path}").fullest
    assert with_model.reward == 2 * 22
    assert with_model.peak == base.peak + with_model.reward


def test_stages_of_ranks_without_a_role() -> None:
    result = plan(MIDDLE, "actor.layout.ranks=8", "critic.layout.first_rank=8", gpus=16)
    assert [[r.role for r in ranks.roles] for ranks in result.ranks] == [["actor", "reference"], ["critic"]]
    assert "update_critic" not in result.ranks[0].stages and "update_actor" not in result.ranks[1].stages
    assert result.fullest.peak < plan(MIDDLE).fullest.peak


@given(pp=st.sampled_from([1, 2, 3, 4]), vpp=st.sampled_from([1, 2]), microbatches=st.integers(1, 16), data=st.data())
@settings(max_examples=60, deadline=None)
def test_layers_in_flight_are_bounded(pp: int, vpp: int, microbatches: int, data: st.DataObject) -> None:
    actor, vpp = _actor(), vpp if pp > 1 else 1
    layers_of_chunks = balanced_layers(actor.arch.layers, pp, vpp, head_in_layers=0.0)
    grid = dataclasses.replace(actor.grid, pp=pp)
    role = dataclasses.replace(actor, grid=grid, vpp=vpp, chunk_layers=layers_of_chunks)
    count = microbatches * (pp if role.vpp > 1 else 1)
    stage = data.draw(st.integers(0, pp - 1))
    layers = layers_in_flight(role, stage, count)
    assert max(role.chunks(stage)) <= layers <= role.stage_layers[stage] * count
    if stage and actor.arch.layers % (pp * vpp) == 0:
        assert layers <= layers_in_flight(role, stage - 1, count)


def _actor() -> RoleSetup:
    return make_setup(load_config(SMALL), models_of(SMALL), 1, on_cuda=True).actor


def test_flops_equal_those_of_the_utilisation_metric() -> None:
    """Every token has a forward and a backward pass. The head runs on responses only, and computes its logits twice."""
    result = plan(SMALL, "algorithm.kl_in_reward=null", "reference=null")
    arch = models_of(SMALL).actor
    _, layers, head = model_sizes(arch)
    sizes = {"layers": arch.layers, "heads": arch.heads, "head_dim": arch.head_dim}
    per_token = training_flops_per_token(layers, **sizes, sequence_tokens=1536)
    samples = 512
    update_actor = next(s for s in result.stages if s.name == "update_actor")
    assert update_actor.flops == pytest.approx(samples * (1536 * per_token + 1024 * 8 * head))
    forward = next(s for s in result.stages if s.name == "forward")
    assert forward.flops == pytest.approx(samples * (2 * 1536 * per_token / 3 + 1024 * 2 * (head + arch.hidden_size)))


def test_time_changes_in_the_expected_direction() -> None:
    base = plan(MIDDLE)
    assert plan(MIDDLE, machine="b200").step_seconds < base.step_seconds
    assert plan(MIDDLE, machine="h200").step_seconds < base.step_seconds
    assert plan(MIDDLE, gpus=32).step_seconds < plan(MIDDLE, gpus=16).step_seconds < base.step_seconds
    assert seconds(plan(MIDDLE, "actor.epochs=2"), "update_actor") == pytest.approx(2 * seconds(base, "update_actor"))
    assert seconds(plan(MIDDLE, "actor.recompute=full"), "update_actor") > seconds(base, "update_actor")
    longer = plan(MIDDLE, "rollout.max_response_tokens=6144", "rollout.generate_batch_sequences=16")
    assert seconds(longer, "rollout") > 2 * seconds(base, "rollout")
    # The bubble of a pipeline shrinks with the number of microbatches.
    bubbles = [seconds(plan(LARGE, f"actor.minibatch_sequences={n}"), "update_actor") for n in (16, 64, 256)]
    assert bubbles[0] > bubbles[1] > bubbles[2]
    assert "rollout takes" in base.bottleneck and "memory bandwidth" in base.bottleneck


def test_machines() -> None:
    for name, machine in MACHINES.items():
        assert machine.name == name
        if machine.is_cuda:
            assert machine.bfloat16_flops == peak_flops(name.upper())
        assert machine.float32_flops < machine.bfloat16_flops
        assert 0 < machine.usable_bytes < machine.memory_bytes
    cpu = MACHINES["cpu"]
    assert cpu.per_rank(4).memory_bytes == cpu.memory_bytes / 4
    assert MACHINES["h100"].per_rank(4) is MACHINES["h100"]
    assert MACHINES["h100"].same_node(8, 15) and not MACHINES["h100"].same_node(7, 8)
    for name, near in (
        ("H-100", "; the nearest is h100"),
        ("A100", "; the nearest is a100-40 or a100-80"),
        ("xyzzy", ""),
    ):
        with pytest.raises(ConfigError, match=f"or a YAML file .*, such as configs/machines/rtx4090.yaml{near}$"):
            find_machine(name)


def apply(path: Path, proposal: Proposal, *overrides: str) -> Plan:
    config = load(path, *overrides, *proposal.overrides)
    return make_plan(config, models_of(path), find_machine(proposal.machine), proposal.gpus)


@pytest.mark.parametrize(
    ("path", "overrides"),
    [
        (MIDDLE, ["actor.layout.tensor_parallel=2", "actor.layout.sequence_parallel=false"]),
        (MIDDLE, ["critic.recompute=none", "critic.microbatch_budget_tokens=65536"]),
        (MIDDLE, ["rollout.generate_batch_sequences=64"]),
        (MIDDLE, ["actor.optimizer.distributed=false", "actor.layout.tensor_parallel=4"]),
        (SMALL, ["actor.microbatch_budget_tokens=65536"]),
        (LARGE, ["actor.recompute=none", "rollout.generate_batch_sequences=32"]),
    ],
)
def test_nearest_layout_fits_if_the_plan_does_not(path: Path, overrides: list[str]) -> None:
    machine, gpus = find_machine(ON[path][0]), ON[path][1]
    config = load(path, *overrides)
    initial = make_plan(config, models_of(path), machine, gpus)
    assert not initial.fits and initial.verdict.startswith("does not fit: rank")
    message, proposal = remedy(config, models_of(path), machine, gpus)
    assert proposal is not None and proposal == nearest_fit(config, models_of(path), machine, gpus)
    assert message == f"the nearest layout that fits: {' '.join(proposal.overrides)}"
    result = apply(path, proposal, *overrides)
    assert result.fits
    assert (result.fullest.peak, result.step_seconds) == (proposal.peak_bytes, proposal.step_seconds)


def test_fitting_plan_is_the_nearest_layout() -> None:
    proposal = nearest_fit(load(MIDDLE), models_of(MIDDLE), MACHINES["h100"], 8)
    assert proposal is not None and proposal.overrides == ()


def test_larger_machine_is_named_if_no_layout_fits() -> None:
    config, models = load(LARGE), models_of(LARGE)
    message, proposal = remedy(config, models, MACHINES["h100"], 16)
    assert message == "no layout on 16 x h100 fits; 16 x h200 would fit"
    assert proposal is not None and apply(LARGE, proposal).fits


@pytest.mark.exhaustive
def test_larger_machines_for_a_large_model() -> None:
    """test_search.py has the same test for small models. This search takes seconds."""
    config, models = load(LARGE), models_of(LARGE)
    message, proposal = remedy(load(LARGE, "critic.path=null"), models_of_own_critic(), MACHINES["b200"], 8)
    assert proposal is not None and proposal.gpus > 8 and message.startswith("no layout on 8 x b200 fits; ")
    tiny = dataclasses.replace(MACHINES["h100"], memory_bytes=5e9, is_cuda=False, shared_by_ranks=False)
    message, proposal = remedy(config, models, tiny, 16)
    assert proposal is None and "nor on four times the number" in message


def models_of_own_critic() -> Models:
    return read_models(load_config(LARGE, ["critic.path=null"]), MODELS).models


@pytest.mark.parametrize(("path", "machine", "gpus"), [(MIDDLE, "h100", 8), (LARGE, "b200", 32), (SMALL, "cpu", 4)])
def test_search_proposes_fitting_layouts_fastest_first(path: Path, machine: str, gpus: int) -> None:
    config = load(path, "rollout.max_response_tokens=4096")
    proposals = best_layouts(config, models_of(path), find_machine(machine), gpus)
    assert 1 <= len(proposals) <= 5
    times = [p.step_seconds for p in proposals]
    assert times == sorted(times)
    for proposal in proposals:
        result = apply(path, proposal, "rollout.max_response_tokens=4096")
        assert result.fits and result.step_seconds == proposal.step_seconds
    best = load(path, *proposals[0].overrides, "rollout.max_response_tokens=4096")
    assert make_plan(best, models_of(path), find_machine(machine), gpus).step_seconds == times[0]


def test_search_makes_room_for_a_longer_context() -> None:
    long = ["rollout.max_response_tokens=32000"]
    assert load(MIDDLE, *long).actor.microbatch_budget_tokens < 33024
    best = best_layouts(load(MIDDLE, *long), models_of(MIDDLE), MACHINES["h200"], 8)[0]
    assert apply(MIDDLE, best, *long).fits
    assert load(MIDDLE, *long, *best.overrides).actor.microbatch_budget_tokens >= 33024


def test_search_beats_the_shipped_layouts() -> None:
    for path, (machine, gpus) in ON.items():
        best = best_layouts(load(path), models_of(path), find_machine(machine), gpus)[0]
        assert best.step_seconds <= plan(path).step_seconds


def test_fewest_devices_have_room_for_a_shared_server() -> None:
    config = load_config(SMALL, ["rollout.servers={tensor_parallel: 4}"])
    assert (fewest_ranks(config), fewest_ranks(config, on_cuda=True)) == (1, 4)
    apart = load_config(SMALL, ["rollout.servers={tensor_parallel: 4, placement: disaggregated}"])
    assert fewest_ranks(apart, on_cuda=True) == 1


def test_fewest_ranks() -> None:
    def ranks(*overrides: str) -> int:
        return fewest_ranks(load_config(MIDDLE, overrides))

    assert ranks() == 8
    assert ranks("critic.layout.tensor_parallel=2", "actor.layout.tensor_parallel=4") == 4
    assert ranks("critic.layout.pipeline_parallel=3") == 24
    sixes = "critic.layout={tensor_parallel: 2, pipeline_parallel: 3}"
    assert ranks("actor.layout.tensor_parallel=4", sixes) == 12  # a multiple of both
    assert ranks("actor.layout={tensor_parallel: 4, ranks: 4}", sixes) == 6  # the actor has four ranks
    assert ranks("critic.layout.first_rank=8", "actor.layout.ranks=8") == 16
    assert ranks("critic.layout.first_rank=4", "actor.layout.ranks=8", "critic.layout.tensor_parallel=2") == 8


def test_configuration_is_not_changed() -> None:
    config = load_config(MIDDLE, ["actor.layout.tensor_parallel=2"])
    before = config.model_dump()
    remedy(config, models_of(MIDDLE), MACHINES["h100"], 8)
    assert isinstance(config, Config) and config.model_dump() == before
