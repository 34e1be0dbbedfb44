"""The planner with SGLang: memory of servers, where they stand, how fast they are."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from megappo.cli import main
from megappo.config import ConfigError, load_config
from megappo.engines.sglang.spec import ServerSpec
from megappo.plan.inputs import Models
from megappo.plan.machines import ASSUMED, MACHINES
from megappo.plan.planner import Plan, make_plan, read_models
from megappo.plan.search import best_layouts, nearest_fit
from megappo.plan.servers import cache_tokens, find_servers, server_weights, token_bytes
from megappo.plan.sizes import model_sizes
from tests.support.places import ROOT

MIDDLE = ROOT / "tests/support/qwen3_8b_8gpu.yaml"
LARGE = ROOT / "configs" / "qwen3_32b_64node_disaggregated_dapo_math.yaml"
KV_BYTES = 2 * 36 * 8 * 128 * 2
"""Of one token of Qwen3-8B: keys and values, layers, heads, channels, bytes."""


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@cache
def models() -> Models:
    return read_models(load_config(MIDDLE), ROOT / "configs" / "models").models


def plan(*overrides: str, gpus: int = 8, machine: str = "h200", **servers: object) -> Plan:
    settings = ", ".join(f"{name}: {value}" for name, value in servers.items())
    words = ["rollout.engine=sglang", f"rollout.sglang={{{settings}}}", *overrides]
    return make_plan(load_config(MIDDLE, words), models(), MACHINES[machine], gpus)


def seconds(found: Plan, stage: str) -> float:
    return next(s.seconds for s in found.stages if s.name == stage)


def test_weights_of_a_server() -> None:
    arch = models().actor
    total = model_sizes(arch)[0]
    assert server_weights(arch, 1) == pytest.approx(total)
    norms = arch.layers * (2 * arch.hidden_size + 2 * arch.head_dim) + arch.hidden_size
    assert 4 * server_weights(arch, 4) == pytest.approx(total + 3 * norms)
    key_value = 2 * arch.layers * arch.hidden_size * arch.head_dim * arch.kv_heads
    assert 16 * server_weights(arch, 16) == pytest.approx(total + 15 * norms + key_value)  # every head on two ranks


def test_room_for_keys_and_values() -> None:
    arch = models().actor
    assert token_bytes(arch, 1, 2) == KV_BYTES and token_bytes(arch, 4, 2) == KV_BYTES / 4
    assert token_bytes(arch, 16, 2) == KV_BYTES / 8
    config = load_config(MIDDLE, ["rollout.sglang={memory_fraction: 0.5}"])
    servers = find_servers(config, 8, on_cuda=True, device_bytes=80e9)
    assert servers is not None and servers.count == 8
    assert cache_tokens(arch, servers, 2) == pytest.approx((40e9 - 2 * model_sizes(arch)[0]) / KV_BYTES)
    limited = load_config(MIDDLE, ["rollout.sglang={max_total_tokens: 9000}"])
    found = find_servers(limited, 8, on_cuda=True, device_bytes=80e9)
    assert found is not None and cache_tokens(arch, found, 2) == 9000
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
    assert plan(*one_ahead, memory_fraction=0.3).fullest.stages == awake.stages  # they work all the time
    buckets = asleep.stages["sync"] - sum(r.resident for r in asleep.roles) - asleep.engine.syncing
    assert buckets == asleep.sync == pytest.approx(3 * 2 * 151936 * 4096)  # the embedding is above a bucket


@pytest.mark.parametrize(
    ("path", "machine", "gpus"),
    [
        ("configs/qwen3_235b_a22b_16node_dapo_math", "h200", 128),
        ("configs/qwen3_30b_a3b_4node_math", "h100", 32),
        ("configs/qwen3_8b_8gpu_math", "h100", 8),
        ("tests/support/qwen3_30b_a3b_4node", "h100", 32),
        ("tests/support/qwen3_8b_8gpu", "h100", 8),
    ],
)
def test_servers_hold_what_is_planned_whatever_is_free_when_they_start(path: str, machine: str, gpus: int) -> None:
    """SGLang holds as many tokens as it is told, or fewer where their keys and values are more than what is free before
    it loads the weights, times its mem_fraction_static, less the weights (its kv_cache_configurator.py). Roles that
    leave the device are at rest by then."""
    config = load_config(ROOT / f"{path}.yaml")
    found = read_models(config, ROOT / "configs" / "models").models
    device = MACHINES[machine].memory_bytes
    folder = ROOT / "configs" / "models" / Path(config.model.path).name
    spec = ServerSpec.of(config, folder, (1,), on_cuda=True, device_bytes=device)
    asked = replace(spec, devices=tuple(range(config.rollout.servers.tensor_parallel))).arguments(1, "key")
    tp, share = config.rollout.servers.tensor_parallel, config.rollout.servers.memory_fraction
    weights, of_token = 2 * server_weights(found.actor, tp), token_bytes(found.actor, tp, 2)
    assert asked["max-total-tokens"] == int((share * device - weights) / of_token) > 4 * config.max_sequence_tokens

    def held(free: float) -> int:
        return min(asked["max-total-tokens"], int((asked["mem-fraction-static"] * free - weights) / of_token))

    planned = make_plan(config, found, MACHINES[machine], gpus)
    assert planned.fits
    trainers = max(sum(role.at_rest for role in ranks.roles) for ranks in planned.ranks)
    assert held(device - trainers) == held(device) == asked["max-total-tokens"]
    if not config.offloads:
        assert (
            share * (device - trainers) - weights < 0.7 * asked["max-total-tokens"] * of_token
        )  # were it a share of that


def test_servers_on_a_cpu_share_the_machine_with_all_ranks() -> None:
    """Two servers of two ranks beside eight trainers: each of these counts for half a server rank."""
    found = plan(engines=2, tensor_parallel=2, machine="cpu").fullest.engine
    weights = 2 * server_weights(models().actor, 2)
    cache = 65536 * KV_BYTES / 2
    assert found.weights == pytest.approx(weights / 2)
    assert found.kv_cache == pytest.approx(cache / 2)
    assert found.idle == found.syncing == pytest.approx((weights + cache) / 2)
    assert found.workspace == pytest.approx(found.total - (weights + cache) / 2) and found.workspace > 0


def test_servers_elsewhere() -> None:
    found = plan(placement="disaggregated", engines=2, tensor_parallel=2)
    trainers, servers = found.ranks[0], found.ranks[-1]
    assert (found.gpus, found.server_gpus, servers.ranks) == (8, 4, (0, 1, 2, 3))
    assert servers.of_servers and not trainers.of_servers
    assert trainers.engine.total == 0 and servers.roles == ()
    assert servers.engine.weights == 2 * server_weights(models().actor, 2)
    assert set(servers.stages) == {"rollout", "sync"}
    assert found.verdict.startswith("fits: ranks 0-3 of the servers need")


def test_colocated_servers_need_the_gpus_of_ranks() -> None:
    """More servers than these hold are refused; of a server that is larger the plan names the GPUs beyond them."""
    with pytest.raises(
        ConfigError,
        match="engines 5 x tensor_parallel 2 is 10 GPUs, but .* of 8 ranks; set engines to at most 4, or",
    ):
        plan(engines=5, tensor_parallel=2)
    assert plan(engines=4, tensor_parallel=2) == plan(tensor_parallel=2)
    assert plan(engines=3, tensor_parallel=2).server_gpus == 0
    assert plan("actor.layout={}", "critic.layout={}", gpus=2, tensor_parallel=4).server_gpus == 2


def test_servers_larger_than_a_node() -> None:
    """Their ranks wait for each other over the network; what a node has no devices for is refused, with the number."""
    large: dict[str, Any] = {"placement": "disaggregated", "engines": 2, "tensor_parallel": 8}
    one, two = plan(**large), plan(**large, nodes=2)
    assert seconds(two, "rollout") > seconds(one, "rollout") and two.ranks[-1].engine == one.ranks[-1].engine
    with pytest.raises(ConfigError, match="puts 32 ranks of a server on a node, which has 8 devices; set .*nodes to 4"):
        plan("rollout.sglang.tensor_parallel=32", gpus=32, memory_fraction=0.3)
    assert plan(gpus=16, tensor_parallel=16, nodes=2, memory_fraction=0.3).fits
    with pytest.raises(
        ConfigError, match="nodes is 2, but the ranks 0 to 7 on its devices are not 4 on each of 2 machines"
    ):
        plan(gpus=16, tensor_parallel=8, nodes=2, memory_fraction=0.3)


def test_time_of_servers() -> None:
    base = plan(memory_fraction=0.3)
    assert seconds(base, "rollout") < seconds(plan_embedded(), "rollout")
    assert seconds(plan(memory_fraction=0.3, engines=4), "rollout") > seconds(base, "rollout")
    assert seconds(plan(memory_fraction=0.15), "rollout") > seconds(base, "rollout")  # fewer sequences at a time
    apart: dict[str, Any] = {"placement": "disaggregated", "engines": 8}
    assert seconds(plan(**apart), "sync") > seconds(base, "sync") - ASSUMED.waking_seconds
    more = plan(**{**apart, "engines": 16})
    assert seconds(more, "rollout") < seconds(plan(**apart), "rollout")
    assert seconds(more, "sync") == pytest.approx(2 * seconds(plan(**apart), "sync"))  # two for each sender


def plan_embedded() -> Plan:
    words = ["rollout.engine=transformers", "rollout.sglang=null"]
    return make_plan(load_config(MIDDLE, words), models(), MACHINES["h200"], 8)


def test_one_step_ahead_hides_the_shorter_half() -> None:
    apart: dict[str, Any] = {"placement": "disaggregated", "engines": 8}
    after, ahead = plan(**apart), plan("rollout.ahead=1", "algorithm.old_logprob=corrected", **apart)
    assert ahead.stages == after.stages
    rollout = seconds(after, "rollout")
    assert after.step_seconds == pytest.approx(sum(s.seconds for s in after.stages))
    assert ahead.step_seconds == pytest.approx(max(rollout, after.step_seconds - rollout))


def test_a_decoding_step_by_hand() -> None:
    """One server of one GPU: weights and caches are read, logits written, once per token; before that, the prompts."""
    found = plan(gpus=8, engines=1, memory_fraction=0.6, max_inflight_sequences=4)
    running, response = 32, 3072  # four sequences of each of eight ranks
    config = load_config(MIDDLE)
    assert config.rollout.max_response_tokens == response
    context = config.data.max_prompt_tokens + response / 2
    step = 2 * model_sizes(models().actor)[0] + running * (context * KV_BYTES + 8 * 151936)
    samples, prompt = config.rollout.prompts_per_step * config.rollout.samples_per_prompt, config.data.max_prompt_tokens
    decoding = samples * response / running * step / (4.8e12 * ASSUMED.bandwidth_share)
    layers = 2 * model_sizes(models().actor)[1] + 4 * 36 * 32 * 128 * prompt
    prompts = samples * (prompt * layers + 2 * 151936 * 4096)
    arithmetic = prompts / (MACHINES["h200"].bfloat16_flops * ASSUMED.compute_share)
    assert seconds(found, "rollout") == pytest.approx(decoding + arithmetic, rel=1e-6)


def test_deterministic_inference_takes_longer_on_gpus() -> None:
    """By default only what `when_stopped: keep` needs is paid for."""
    fast = seconds(plan(memory_fraction=0.3), "rollout")
    slow = pytest.approx(ASSUMED.deterministic_slowdown * fast)
    assert seconds(plan(memory_fraction=0.3, deterministic="true"), "rollout") == slow != fast
    assert seconds(plan("rollout.when_stopped=keep", memory_fraction=0.3), "rollout") == slow
    on_cpu = [seconds(plan(machine="cpu", deterministic=choice), "rollout") for choice in ("true", "false", "null")]
    assert len(set(on_cpu)) == 1


def test_the_nearest_fit_lowers_the_servers_share() -> None:
    config = load_config(MIDDLE, ["rollout.engine=sglang", "rollout.sglang={memory_fraction: 0.7}"])
    proposal = nearest_fit(config, models(), MACHINES["h100"], 8)
    assert proposal is not None and any(o.startswith("rollout.sglang.memory_fraction=") for o in proposal.overrides)
    found = best_layouts(config, models(), MACHINES["h100"], 8)
    assert found and found[0].step_seconds == min(p.step_seconds for p in found)


def test_json_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(LARGE), "--machine", "h200", "--gpus", "320"]
    assert main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    found = TypeAdapter(Plan).validate_python(content["plan"])
    assert (found.fits, found.server_gpus) == (True, 192)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "320 x h200 and 192 of" in out and "server" in out
