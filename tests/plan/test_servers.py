"""The planner with SGLang: memory, placement and speed of servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from megappo.config import ConfigError, load_config
from megappo.engines.sglang.servers.spec import ServerSpec
from megappo.plan.bytes.servers import cache_tokens, find_servers, server_weights, token_bytes
from megappo.plan.bytes.sizes import model_sizes
from megappo.plan.hardware.machines import ASSUMED, MACHINES
from megappo.plan.inputs import Models
from megappo.plan.planner import Plan, make_plan, read_models
from megappo.plan.search import best_layouts, nearest_fit
from tests.support.places import ROOT

MIDDLE = ROOT / "tests/support/qwen3_8b_8gpu.yaml"
LARGE = ROOT / "configs" / "qwen3_32b_64node_disaggregated_dapo_math.yaml"
KV_BYTES = 2 * 36 * 8 * 128 * 2
"""Bytes per token of Qwen3-8B: keys and values, layers, heads, channels, bytes."""


@cache
def models() -> Models:
    return read_models(load_config(MIDDLE), ROOT / "configs" / "models").models


def plan(*overrides: str, gpus: int = 8, machine: str = "h200", **servers: object) -> Plan:
    settings = ", ".join(f"{name}: {value}" for name, value in servers.items())
    changes = [f"rollout.servers={{{settings}}}", *overrides]
    return make_plan(load_config(MIDDLE, changes), models(), MACHINES[machine], gpus)


def seconds(result: Plan, stage: str) -> float:
    return next(s.seconds for s in result.stages if s.name == stage)


def test_weights_of_a_server() -> None:
    arch = models().actor
    total = model_sizes(arch)[0]
    assert server_weights(arch, 1) == pytest.approx(total)
    norms = arch.layers * (2 * arch.hidden_size + 2 * arch.head_dim) + arch.hidden_size
    assert 4 * server_weights(arch, 4) == pytest.approx(total + 3 * norms)
    key_value = 2 * arch.layers * arch.hidden_size * arch.head_dim * arch.kv_heads
    assert 16 * server_weights(arch, 16) == pytest.approx(total + 15 * norms + key_value)  # every head is on two ranks


def test_capacity_of_the_cache() -> None:
    arch = models().actor
    assert token_bytes(arch, 1, 2) == KV_BYTES and token_bytes(arch, 4, 2) == KV_BYTES / 4
    assert token_bytes(arch, 16, 2) == KV_BYTES / 8
    config = load_config(MIDDLE, ["rollout.servers={memory_fraction: 0.5}"])
    servers = find_servers(config, 8, on_cuda=True, device_bytes=80e9)
    assert servers is not None and servers.count == 8
    assert cache_tokens(arch, servers, 2) == pytest.approx((40e9 - 2 * model_sizes(arch)[0]) / KV_BYTES)
    limited = load_config(MIDDLE, ["rollout.servers={max_total_tokens: 9000}"])
    actual = find_servers(limited, 8, on_cuda=True, device_bytes=80e9)
    assert actual is not None and cache_tokens(arch, actual, 2) == 9000
    on_cpu = find_servers(config, 8, on_cuda=False, device_bytes=80e9)
    assert on_cpu is not None and cache_tokens(arch, on_cpu, 2) == 65536


def test_colocated_servers_sleep() -> None:
    asleep, awake = plan(memory_fraction=0.3).fullest, plan(memory_fraction=0.3, sleep="false").fullest
    static = 0.3 * 141e9
    assert awake.stages["update_actor"] - asleep.stages["update_actor"] == pytest.approx(static)
    assert asleep.engine.idle == ASSUMED.cuda_reserve_bytes
    assert asleep.stages["rollout"] == awake.stages["rollout"]
    assert asleep.engine.weights + asleep.engine.kv_cache == pytest.approx(static)
    one_ahead = ("rollout.ahead=1", "algorithm.old_logprob=corrected")
    assert plan(*one_ahead, memory_fraction=0.3).fullest.stages == awake.stages  # the servers run all the time
    buckets = asleep.stages["sync"] - sum(r.resident for r in asleep.roles) - asleep.engine.syncing
    assert buckets == asleep.sync == pytest.approx(3 * 2 * 151936 * 4096)  # the embedding is larger than a bucket


@pytest.mark.parametrize(
    ("path", "machine", "gpus"),
    [("configs/qwen3_235b_a22b_16node_dapo_math", "h200", 128), ("configs/qwen3_30b_a3b_4node_math", "h100", 32),
     ("configs/qwen3_8b_8gpu_math", "h100", 8), ("tests/support/qwen3_30b_a3b_4node", "h100", 32),
     ("tests/support/qwen3_8b_8gpu", "h100", 8)],
)  # fmt: skip
def test_servers_have_the_planned_cache_for_any_free_memory(path: str, machine: str, gpus: int) -> None:
    """SGLang allocates `max-total-tokens` tokens at most. The limit is also the memory before the weights are loaded,
    times mem_fraction_static, less the weights (its kv_cache_configurator.py). Offloaded roles have left the device
    before."""
    config = load_config(ROOT / f"{path}.yaml")
    models_read = read_models(config, ROOT / "configs" / "models").models
    device = MACHINES[machine].memory_bytes
    folder = ROOT / "configs" / "models" / Path(config.model.path).name
    spec = ServerSpec.of(config, folder, (1,), on_cuda=True, device_bytes=device)
    arguments = replace(spec, devices=tuple(range(config.rollout.server_settings.tensor_parallel))).arguments(1, "key")
    tp, share = config.rollout.server_settings.tensor_parallel, config.rollout.server_settings.memory_fraction
    weights, of_token = 2 * server_weights(models_read.actor, tp), token_bytes(models_read.actor, tp, 2)
    assert arguments["max-total-tokens"] == int((share * device - weights) / of_token) > 4 * config.max_sequence_tokens

    def token_capacity(free: float) -> int:
        return min(arguments["max-total-tokens"], int((arguments["mem-fraction-static"] * free - weights) / of_token))

    planned = make_plan(config, models_read, MACHINES[machine], gpus)
    assert planned.fits
    trainers = max(sum(role.at_rest for role in ranks.roles) for ranks in planned.ranks)
    assert token_capacity(device - trainers) == token_capacity(device) == arguments["max-total-tokens"]
    if not config.offloads:
        # The share of the remaining memory would be too small.
        assert share * (device - trainers) - weights < 0.7 * arguments["max-total-tokens"] * of_token


def test_servers_on_a_cpu_share_the_machine() -> None:
    """There are two servers of two ranks, and eight trainers. Each trainer has the share of half a server rank."""
    engine = plan(count=2, tensor_parallel=2, machine="cpu").fullest.engine
    weights = 2 * server_weights(models().actor, 2)
    cache = 65536 * KV_BYTES / 2
    assert engine.weights == pytest.approx(weights / 2)
    assert engine.kv_cache == pytest.approx(cache / 2)
    assert engine.idle == engine.syncing == pytest.approx((weights + cache) / 2)
    assert engine.workspace == pytest.approx(engine.total - (weights + cache) / 2) and engine.workspace > 0


def test_servers_on_separate_gpus() -> None:
    result = plan(placement="disaggregated", count=2, tensor_parallel=2)
    trainers, servers = result.ranks[0], result.ranks[-1]
    assert (result.gpus, result.server_gpus, servers.ranks) == (8, 4, (0, 1, 2, 3))
    assert servers.of_servers and not trainers.of_servers
    assert trainers.engine.total == 0 and servers.roles == ()
    assert servers.engine.weights == 2 * server_weights(models().actor, 2)
    assert set(servers.stages) == {"rollout", "sync"}
    assert result.verdict.startswith("fits: ranks 0-3 of the servers need")


def test_colocated_servers_need_the_gpus_of_ranks() -> None:
    """More servers than the GPUs of the ranks can run are refused. If one server is larger than the GPUs of the ranks,
    the plan adds the missing GPUs."""
    message = "count 5 x tensor_parallel 2 is 10 GPUs, but .* of 8 ranks; set count to at most 4, or"
    with pytest.raises(ConfigError, match=message):
        plan(count=5, tensor_parallel=2)
    assert plan(count=4, tensor_parallel=2) == plan(tensor_parallel=2)
    assert plan(count=3, tensor_parallel=2).server_gpus == 0
    assert plan("actor.layout={}", "critic.layout={}", gpus=2, tensor_parallel=4).server_gpus == 2


def test_servers_larger_than_a_node() -> None:
    """The ranks of a large server communicate over the network. A server that needs more devices than its nodes have is
    refused, with the required number."""
    large: dict[str, Any] = {"placement": "disaggregated", "count": 2, "tensor_parallel": 8}
    one, two = plan(**large), plan(**large, nodes=2)
    assert seconds(two, "rollout") > seconds(one, "rollout") and two.ranks[-1].engine == one.ranks[-1].engine
    with pytest.raises(ConfigError, match="puts 32 ranks of a server on a node, which has 8 devices; set .*nodes to 4"):
        plan("rollout.servers.tensor_parallel=32", gpus=32, memory_fraction=0.3)
    assert plan(gpus=16, tensor_parallel=16, nodes=2, memory_fraction=0.3).fits
    message = "nodes is 2, but the ranks 0 to 7 on its devices are not 4 on each of 2 machines"
    with pytest.raises(ConfigError, match=message):
        plan(gpus=16, tensor_parallel=8, nodes=2, memory_fraction=0.3)


def test_time_of_servers() -> None:
    base = plan(memory_fraction=0.3)
    assert seconds(base, "rollout") < seconds(plan_embedded(), "rollout")
    assert seconds(plan(memory_fraction=0.3, count=4), "rollout") > seconds(base, "rollout")
    assert seconds(plan(memory_fraction=0.15), "rollout") > seconds(base, "rollout")  # fewer concurrent sequences
    apart: dict[str, Any] = {"placement": "disaggregated", "count": 8}
    assert seconds(plan(**apart), "sync") > seconds(base, "sync") - ASSUMED.waking_seconds
    more = plan(**{**apart, "count": 16})
    assert seconds(more, "rollout") < seconds(plan(**apart), "rollout")
    assert seconds(more, "sync") == pytest.approx(2 * seconds(plan(**apart), "sync"))  # two servers per sender


def plan_embedded() -> Plan:
    overrides = ["rollout.engine=transformers"]
    return make_plan(load_config(MIDDLE, overrides), models(), MACHINES["h200"], 8)


def test_one_step_ahead_hides_the_shorter_part() -> None:
    apart: dict[str, Any] = {"placement": "disaggregated", "count": 8}
    after, ahead = plan(**apart), plan("rollout.ahead=1", "algorithm.old_logprob=corrected", **apart)
    assert ahead.stages == after.stages
    rollout = seconds(after, "rollout")
    assert after.step_seconds == pytest.approx(sum(s.seconds for s in after.stages))
    assert ahead.step_seconds == pytest.approx(max(rollout, after.step_seconds - rollout))


def test_a_decoding_step_by_hand() -> None:
    """Plan one server on one GPU. Each decoding step reads weights and caches, and writes logits. The prompts are
    computed before."""
    result = plan(gpus=8, count=1, memory_fraction=0.6, max_inflight_sequences=4)
    running, response = 32, 3072  # four sequences for each of eight ranks
    config = load_config(MIDDLE)
    assert config.rollout.max_response_tokens == response
    context = config.data.max_prompt_tokens + response / 2
    step = 2 * model_sizes(models().actor)[0] + running * (context * KV_BYTES + 8 * 151936)
    samples, prompt = config.rollout.prompts_per_step * config.rollout.samples_per_prompt, config.data.max_prompt_tokens
    decoding = samples * response / running * step / (4.8e12 * ASSUMED.bandwidth_share)
    layers = 2 * model_sizes(models().actor)[1] + 4 * 36 * 32 * 128 * prompt
    prompts = samples * (prompt * layers + 2 * 151936 * 4096)
    arithmetic = prompts / (MACHINES["h200"].bfloat16_flops * ASSUMED.compute_share)
    assert seconds(result, "rollout") == pytest.approx(decoding + arithmetic, rel=1e-6)


def test_deterministic_inference_is_slower_on_gpus() -> None:
    """By default, only `when_stopped: keep` requires deterministic inference."""
    fast = seconds(plan(memory_fraction=0.3), "rollout")
    slow = pytest.approx(ASSUMED.deterministic_slowdown * fast)
    assert seconds(plan(memory_fraction=0.3, deterministic="true"), "rollout") == slow != fast
    assert seconds(plan("rollout.when_stopped=keep", memory_fraction=0.3), "rollout") == slow
    on_cpu = [seconds(plan(machine="cpu", deterministic=choice), "rollout") for choice in ("true", "false", "null")]
    assert len(set(on_cpu)) == 1


def test_nearest_fit_lowers_the_memory_fraction() -> None:
    config = load_config(MIDDLE, ["rollout.servers={memory_fraction: 0.7}"])
    proposal = nearest_fit(config, models(), MACHINES["h100"], 8)
    assert proposal is not None and any(o.startswith("rollout.servers.memory_fraction=") for o in proposal.overrides)
    layouts = best_layouts(config, models(), MACHINES["h100"], 8)
    assert layouts and layouts[0].step_seconds == min(p.step_seconds for p in layouts)


def test_json_and_table(output_of: Callable[..., str]) -> None:
    arguments = ["plan", str(LARGE), "--machine", "h200", "--gpus", "320"]
    content = json.loads(output_of(*arguments, "--json"))
    result = TypeAdapter(Plan).validate_python(content["plan"])
    assert (result.fits, result.server_gpus) == (True, 192)
    out = output_of(*arguments)
    assert "320 x h200 and 192 of" in out and "server" in out
