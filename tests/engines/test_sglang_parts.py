"""Tests of the SGLang engine without a server: fingerprints, sampling noise, the environment and the settings."""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.multiprocessing import reductions
from transformers import PretrainedConfig

from megappo.config.load import load_config
from megappo.config.rules.rollout import engine_rules
from megappo.config.rules.servers import server_rules
from megappo.config.schema import Config
from megappo.config.sections.engine import ServerSettings
from megappo.config.sections.server_words import OWNED, REFUSED, word_rules
from megappo.engines.registry import find_engine
from megappo.engines.sglang.client import Endpoint
from megappo.engines.sglang.servers import cpu_platform, fleet
from megappo.engines.sglang.servers.inspection import (
    ServerInfo,
    check_hooks,
    check_lengths,
    check_routing,
    check_sampling,
)
from megappo.engines.sglang.servers.rendezvous import MultiNodeRendezvous, ServerPart
from megappo.engines.sglang.servers.server import EngineError
from megappo.engines.sglang.servers.spec import ServerSpec, unheard_variables
from megappo.engines.sglang.version import require_sglang
from megappo.engines.sglang.weights.fingerprint import Fingerprints, differing
from megappo.engines.sglang.weights.slice_loader import LOADER, SlicePlace, describe, load_slices
from megappo.engines.sglang.weights.sync import ServerSync, SyncRun, SyncSeconds
from megappo.engines.sglang.weights.transport import Loaded, serialize
from megappo.errors import RunError
from megappo.families.architecture import ModelShape
from megappo.families.blocks import Attention, Experts, GatedMlp, QueryKeyNorms, QueryKeyValueBiases
from megappo.families.declaration import ArchitectureConfig, Block, Family
from megappo.families.parameters import model_parameters, tensor_shapes
from megappo.network.interfaces import interface_towards
from megappo.plan.bytes.cache import PlannedCache
from megappo.ppo import run
from megappo.reshard.slices import EngineShape, Receiver
from megappo.reshard.stream import ReceiverPayload
from megappo.runtime.process import Runtime
from megappo.runtime.ranks import nccl
from tests.support.places import ROOT, TINY

CACHE = PlannedCache(9000, 100)


def arch(*blocks: Block, **changes: Any) -> ArchitectureConfig:
    sizes: dict[str, Any] = {
        "layers": 2, "hidden_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_hidden_size": 24,
        "vocab_size": 131, "max_position_embeddings": 64, "tied_embeddings": False, "norm_eps": 1e-6,
        "initializer_range": 0.02, "hf_config": PretrainedConfig(),
    }  # fmt: skip
    return ArchitectureConfig(family="toy", declaration=Family("toy", (), blocks), **(sizes | changes))


def checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).digest()[:8].hex()


@pytest.mark.parametrize(("tp", "groups"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_fingerprints_match_engine_parameters(tp: int, groups: int) -> None:
    """The expected parameters are built step by step: fused and sharded, with repeated key-value heads, and with the
    vocabulary padded to a multiple of 64. Heads and embedding are sharded within each attention group."""
    a = arch(Attention(), GatedMlp(), QueryKeyValueBiases(), QueryKeyNorms())
    parameters = list(model_parameters(a))
    whole = {name: torch.randn(shape) for name, shape in tensor_shapes(a).items()}
    fingerprints = Fingerprints(EngineShape(a, tp, attention=groups)).of_bucket(parameters, whole)
    ranks = tp // groups
    assert {rank for rank, _ in fingerprints} == set(range(tp))
    layer = "model.layers.1."
    for rank in range(tp):
        place = rank % ranks
        q = whole[layer + "self_attn.q_proj.weight"].chunk(ranks)[place]
        head = place * 2 // ranks
        heads = slice(head * 8, (head + max(1, 2 // ranks)) * 8)
        k, v = (whole[layer + f"self_attn.{n}_proj.weight"][heads] for n in "kv")
        assert fingerprints[rank, layer + "self_attn.qkv_proj.weight"] == checksum(torch.cat([q, k, v]))
        out = whole[layer + "self_attn.o_proj.weight"].chunk(ranks, dim=1)[place]
        assert fingerprints[rank, layer + "self_attn.o_proj.weight"] == checksum(out)
        gate, up = (whole[layer + f"mlp.{n}_proj.weight"].chunk(tp)[rank] for n in ("gate", "up"))
        assert fingerprints[rank, layer + "mlp.gate_up_proj.weight"] == checksum(torch.cat([gate, up]))
        down = whole[layer + "mlp.down_proj.weight"].chunk(tp, dim=1)[rank]
        assert fingerprints[rank, layer + "mlp.down_proj.weight"] == checksum(down)
        padded = torch.zeros(192, 16)
        padded[:131] = whole["lm_head.weight"]
        assert fingerprints[rank, "lm_head.weight"] == checksum(padded.chunk(tp)[rank])
        padded[:131] = whole["model.embed_tokens.weight"]
        assert fingerprints[rank, "model.embed_tokens.weight"] == checksum(padded.chunk(ranks)[place])
        assert fingerprints[rank, layer + "self_attn.k_norm.weight"] == checksum(
            whole[layer + "self_attn.k_norm.weight"]
        )


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_experts_of_several_buckets_share_one_fingerprint(tp: int, ep: int) -> None:
    """An engine has two parameters for the experts of a layer. Each rank has its part of the experts of its group."""
    a = arch(Attention(), Experts(), experts=4)
    experts = [p for p in model_parameters(a) if p.layer == 1 and p.expert is not None]
    whole = {name: torch.randn(shape) for name, shape in tensor_shapes(a).items()}
    fingerprints = Fingerprints(EngineShape(a, tp, ep))
    assert fingerprints.of_bucket(experts[:2], whole) == {}
    sums = fingerprints.of_bucket(experts[2:5], whole) | fingerprints.of_bucket(experts[5:], whole)
    prefix = "model.layers.1.mlp.experts"
    assert sums.keys() == {(rank, f"{prefix}.{name}_weight") for rank in range(tp) for name in ("w13", "w2")}
    for rank in range(tp):
        share, place = rank * ep // tp, rank % (tp // ep)
        experts_of_group = range(4 * share // ep, 4 * (share + 1) // ep)
        gate, up = (
            torch.stack([whole[f"{prefix}.{e}.{n}_proj.weight"].chunk(tp // ep)[place] for e in experts_of_group])
            for n in ("gate", "up")
        )
        down = torch.stack(
            [whole[f"{prefix}.{e}.down_proj.weight"].chunk(tp // ep, dim=1)[place] for e in experts_of_group]
        )
        assert sums[rank, f"{prefix}.w13_weight"] == checksum(torch.cat([gate, up], dim=1))
        assert sums[rank, f"{prefix}.w2_weight"] == checksum(down)


def test_sync_threads_use_device_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprints on a GPU move tensors to the thread's current device. By default this would be device 0 on every
    rank."""
    devices: dict[int, int] = {}
    worked: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.update({threading.get_ident(): device}))

    both = threading.Barrier(2, timeout=60)  # the load and the fingerprints must run in two threads

    def work() -> None:
        worked.append(threading.get_ident())
        both.wait()

    class Watched:
        def prepare(self, payloads: Loaded, others: Sequence[int]) -> Callable[[], None]:
            return work

        def close(self) -> None: ...

    receiver = Receiver(0)
    monkeypatch.setattr(Fingerprints, "of_bucket", lambda *_: work())
    server = ServerSync(Endpoint(0, "", "", 0), Watched(), [receiver], 0)
    run = SyncRun([server], EngineShape(arch(), 1), 60.0, True, SyncSeconds())
    run.load([(ReceiverPayload(receiver, (), ()), torch.empty(0))])
    run.settle()
    assert len(set(worked)) == 2 and threading.get_ident() not in worked
    assert [devices[thread] for thread in worked] == [3, 3]


def test_differing_parameters_are_named() -> None:
    sent = {(0, "a"): "1", (1, "a"): "2", (0, "b"): "3"}
    assert differing(sent, sent) == []
    assert differing(sent, sent | {(1, "a"): "x"}) == ["a"]
    assert differing(sent, {(0, "a"): "1", (1, "a"): "2"}) == ["b"]
    assert differing(sent, sent | {(0, "c"): "9"}) == ["c"]


def murmur(data: bytes) -> int:
    """Compute MurmurHash3 (x86, 32 bit) with seed 0 over whole blocks, like the reference implementation."""
    mask, h = 0xFFFFFFFF, 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        h = (h * 5 + 0xE6546B64) & mask
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def test_cpu_sampling_noise_equals_gpu_noise() -> None:
    """The blocks of the hash are the low and high half of the seed, the position and the column."""
    seeds = torch.tensor([1, 2**62 + 12345, 2**63 - 1], dtype=torch.int64)
    positions, columns = torch.tensor([0, 7, 100_000]), torch.arange(5)
    hashes = cpu_platform.murmur_hash32(seeds.to(torch.uint64), positions, columns)
    assert hashes.dtype == torch.uint32
    for n, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        blocks = [seed & 0xFFFFFFFF, seed >> 32, position]
        expected = [murmur(b"".join(x.to_bytes(4, "little") for x in [*blocks, c])) for c in range(5)]
        assert hashes[n].tolist() == expected


def test_cpu_platform_requires_absence_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cpu_platform.activate() == "megappo.engines.sglang.servers.cpu_platform.CpuPlatform"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu_platform.activate() is None
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    points = {group: " = ".join(*entries.items()) for group, entries in declared.items()}
    assert points == dict(cpu_platform.ENTRY_POINTS)


@pytest.mark.waits
def test_hooks_apply_only_to_megappo_cpu_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("sglang.srt.plugins.hook_registry").HookRegistry
    targets: list[str] = []
    monkeypatch.setattr(registry, "register", lambda target, *_: targets.append(target))
    for platform, cuda in (("", False), (cpu_platform.PLATFORM_NAME, True)):
        monkeypatch.setenv("SGLANG_PLATFORM", platform)
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        cpu_platform.register_hooks()
    assert targets == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu_platform.register_hooks()
    assert len(targets) == 1


def test_later_parts_do_not_check_ports_of_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine, the first part may already use its ports. SGLang would fail after 30 seconds."""
    registry = pytest.importorskip("sglang.srt.plugins.hook_registry").HookRegistry
    hooks: list[Callable[..., None]] = []
    settings = SimpleNamespace(wait_port_available=lambda *_port: False)
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", settings)
    monkeypatch.setattr(registry, "register", lambda _target, hook, _kind: hooks.append(hook))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SGLANG_PLATFORM", cpu_platform.PLATFORM_NAME)
    monkeypatch.setattr(multiprocessing, "set_start_method", lambda *_name, **_force: None)
    cpu_platform.register_hooks()
    for number, sees_them_free in ((0, False), (1, True)):
        hooks[0](None, SimpleNamespace(node_rank=number))
        assert settings.wait_port_available(11461, "port_base") is sees_them_free


def test_missing_sglang_is_reported_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_name: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(RunError, match="SGLang is not installed, but the settings need it; pip install"):
        require_sglang()
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.6.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match="SGLang is 0.6.0, must be 0.5.23 on a CPU"):
        require_sglang()


@pytest.mark.waits
def test_server_parts_accept_only_their_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang reads pickles from any connection. An exported value of the variable takes precedence."""
    apart = ServerSettings(tensor_parallel=4, data_parallel_attention=2, nodes=2)
    for settings, expected in (
        (apart, "10.0.0.1,10.0.0.2"),
        (apart.model_copy(update={"data_parallel_attention": 1}), None),
    ):
        rendezvous = MultiNodeRendezvous.host("127.0.0.1", 0, settings)
        rendezvous.peers = frozenset({"10.0.0.2", "10.0.0.1"})
        part = ServerPart(rendezvous, 0)
        part.begin()
        spec = ServerSpec(tmp_path, "float32", settings, (1,), False, tmp_path, CACHE, cores=(0,))
        monkeypatch.delenv("SGLANG_ZMQ_ALLOWED_PEERS", raising=False)
        assert spec.environment(tmp_path, part).get("SGLANG_ZMQ_ALLOWED_PEERS") == expected
        monkeypatch.setenv("SGLANG_ZMQ_ALLOWED_PEERS", "10.0.0.0")
        assert spec.environment(tmp_path, part)["SGLANG_ZMQ_ALLOWED_PEERS"] == "10.0.0.0"
    assert unheard_variables({"SGLANG_ZMQ_ALLOWED_PEERS": "10.0.0.0", "SGLANG_LOG_GC": "1"}) == ["SGLANG_LOG_GC"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "lo"),
        ({"host": "192.0.2.7"}, "lo"),  # weights are in shared memory of the machine
        ({"settings": ServerSettings(placement="disaggregated")}, "lo"),
        ({"settings": ServerSettings(placement="disaggregated"), "host": "192.0.2.7"}, interface_towards("192.0.2.7")),
        ({"settings": ServerSettings(placement="disaggregated"), "host": "192.0.2.7", "devices": (0, 1)}, "lo"),
        ({"settings": ServerSettings(placement="disaggregated"), "host": "192.0.2.7", "called": "a judge"}, "lo"),
    ],
)
def test_server_ranks_connect_over_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: str | None
) -> None:
    """Gloo uses the interface towards the trainers only if trainers on other machines join a group with the server."""
    spec = replace(
        ServerSpec(tmp_path, "float32", ServerSettings(), (1,), False, tmp_path, CACHE, cores=(0,)), **changes
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert spec.environment(tmp_path).get("GLOO_SOCKET_IFNAME") == expected
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert spec.environment(tmp_path)["GLOO_SOCKET_IFNAME"] == (expected or "eth0")


def test_server_environment_excludes_torchrun_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.setenv(name, "1")
    settings = ServerSettings(tensor_parallel=2, arguments={"chunked-prefill-size": 64})
    spec = ServerSpec(tmp_path, "float32", settings, (1, 5), False, tmp_path, CACHE, cores=(0, 1, 2, 3))
    environment = spec.environment(tmp_path)
    assert not {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SGLANG_USE_CPU_ENGINE"} & environment.keys()
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    arguments = spec.arguments(1234, "secret")
    assert arguments["api-key"] == "secret" and arguments["chunked-prefill-size"] == 64
    assert arguments["json-model-override-args"] == '{"eos_token_id": [1, 5], "quantization_config": null}'
    on_gpu = replace(spec, devices=(2, 3), memory_saver=True)
    assert on_gpu.environment(tmp_path)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert on_gpu.arguments(1, "k")["enable-memory-saver"] is True
    assert "device" not in on_gpu.arguments(1, "k")
    # Ranks of a server sample separately without seeds, so the tokens must be synchronized.
    assert on_gpu.environment(tmp_path)["SYNC_TOKEN_IDS_ACROSS_TP"] == "1"
    for same in (replace(on_gpu, deterministic=True), replace(on_gpu, settings=ServerSettings())):
        assert "SYNC_TOKEN_IDS_ACROSS_TP" not in same.environment(tmp_path)


def on_a_gpu(folder: Path, **changes: Any) -> ServerSpec:
    """Return the specification of a sleeping server on one GPU."""
    cache = PlannedCache(60000, 1000, 384)
    spec = ServerSpec(folder, "bfloat16", ServerSettings(), (1,), False, folder, cache, devices=(0,), memory_saver=True)
    return replace(spec, **changes)


def test_gpu_server_captures_only_needed_graphs(tmp_path: Path) -> None:
    """SGLang's own parser reads the arguments. On CUDA, SGLang captures prefill graphs by default, and decode graphs
    for up to 256 sequences."""
    parser = argparse.ArgumentParser()
    server_args = pytest.importorskip("sglang.srt.server_args")
    server_args.ServerArgs.add_cli_args(parser)
    for experts in (False, True):
        arguments = on_a_gpu(tmp_path, has_experts=experts).arguments(1, "k")
        command_line = [
            f"--{name}" if value is True else f"--{name}={value}" for name, value in arguments.items() if value
        ]
        read = parser.parse_args(command_line)
        assert read.cuda_graph_backend_prefill == "disabled" and read.cuda_graph_max_bs_decode == 384
        assert read.enable_memory_saver and read.sleep_on_idle and read.max_total_tokens == 60000
        assert read.moe_runner_backend == ("triton" if experts else "auto")
    unknown = on_a_gpu(tmp_path, cache=CACHE).arguments(1, "k")
    assert CACHE.sequences is None and "cuda-graph-max-bs-decode" not in unknown


def test_graphs_of_sleeping_server_release_memory(tmp_path: Path) -> None:
    name = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    assert on_a_gpu(tmp_path).environment(tmp_path)[name] == "1"
    assert name not in on_a_gpu(tmp_path, memory_saver=False).environment(tmp_path)
    # SGLang does not support both together.
    breakable = ServerSettings(arguments={"cuda-graph-backend-prefill": "breakable"})
    assert name not in on_a_gpu(tmp_path, settings=breakable).environment(tmp_path)


@pytest.mark.waits
def test_servers_cannot_import_megatron(tmp_path: Path) -> None:
    """SGLang imports Megatron for debugging tools. Megatron would set torch_memory_saver to a mode that cannot hook
    graphs."""
    environment = on_a_gpu(tmp_path).environment(tmp_path)
    command = [sys.executable, "-c", "import megappo.engines.sglang.weights.slice_loader, megatron.core"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "ImportError: servers do not use Megatron-Core"


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment")
@pytest.mark.parametrize(
    ("config", "module"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "llama"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "qwen3_moe"),
        ({"architectures": ["ForCausalLM"]}, ""),
        ({"architectures": []}, ""),
        ({}, ""),
        (None, ""),
    ],
)
@pytest.mark.parametrize("hardware", [{}, {"devices": (), "cores": (0,)}], ids=["gpu", "cpu"])
def test_server_imports_only_its_own_model(
    tmp_path: Path, config: dict[str, Any] | None, module: str, hardware: dict[str, Any]
) -> None:
    """A package in the import path selects the model, unless the settings name another package. All models are
    imported if SGLang has no such model."""
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    environment = on_a_gpu(tmp_path, **hardware).environment(tmp_path)
    name = environment.get("SGLANG_EXTERNAL_MODEL_PACKAGE")
    assert (name is not None) == bool(module)
    if name is not None:
        (package,) = {Path(p, name) for p in environment["PYTHONPATH"].split(os.pathsep) if Path(p, name).is_dir()}
        lines = [line for file in package.glob("*.py") for line in file.read_text().splitlines()]
        assert lines == [f"from sglang.srt.models.{module} import EntryClass"]
    own = ServerSettings(environment={"SGLANG_EXTERNAL_MODEL_PACKAGE": "mine"})
    environment = on_a_gpu(tmp_path, settings=own, **hardware).environment(tmp_path)
    assert environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "mine"


def test_servers_get_the_number_of_sequences() -> None:
    """The number covers all requests of a step to one server, limited by the room for prompts."""
    base_overrides = ["rollout.servers={count: 2, placement: disaggregated}"]

    def sequences(*more: str) -> int | None:
        config = load_config(ROOT / "configs/sglang_quickstart.yaml", [*base_overrides, *more])
        return ServerSpec.of(config, TINY, (1,), on_cuda=False).cache.sequences

    assert sequences() == 50 * 8 / 2
    tokens = 16 * (8 + 1)
    assert sequences(f"rollout.servers.max_total_tokens={tokens}") == 16


@pytest.fixture
def one_gpu_per_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the last task on a machine with four GPUs, where `srun --gpus-per-task=1` shows one GPU to each task."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: Runtime, **settings: Any) -> list[dict[str, str]]:
    """Return the environment variables of the servers that this rank starts."""
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(fleet, "all_gather_objects", lambda value: [value] * runtime.world_size)
    monkeypatch.setattr(Runtime, "release_cached_memory", lambda self: None)
    monkeypatch.setattr(fleet, "agreed", lambda work, _caught: work())
    monkeypatch.setattr(fleet, "start_server", lambda spec, *_, **__: environments.append(spec.environment(tmp_path)))
    fleet.Fleet(ServerSpec(tmp_path, "bfloat16", ServerSettings(**settings), (1,), False, tmp_path, CACHE), runtime)
    return environments


@pytest.mark.usefixtures("one_gpu_per_task")
def test_server_uses_the_visible_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the rank, the GPU is number 0 of its own variable, whatever the number on the machine."""
    last = Runtime(rank=3, world_size=4, local_rank=3, device=torch.device("cuda", 0))
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in started(monkeypatch, tmp_path, last)] == ["3"]
    config = load_config(ROOT / "configs/sglang_quickstart.yaml")
    find_engine(config.rollout)
    for servers, message in (
        (
            "{tensor_parallel: 2}",
            "tensor_parallel is 2, but each rank sees only one GPU, .*; set tensor_parallel to 1, or let each",
        ),
        (
            "{placement: disaggregated}",
            "is disaggregated, but each rank sees only one GPU .*; set placement to colocated",
        ),
    ):
        rollout = load_config(ROOT / "configs/sglang_quickstart.yaml", [f"rollout.servers={servers}"]).rollout
        with pytest.raises(RunError, match=message):
            find_engine(rollout)


def test_server_can_use_cores_of_all_local_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A launcher may have bound the starting rank to a few cores. The server is not limited to these cores."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    third = Runtime(rank=2, world_size=4, local_rank=2, device=torch.device("cuda", 2))
    cores_of_servers: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        fleet, "all_gather_objects", lambda value: [(value[0], {2 * rank, 2 * rank + 1}) for rank in range(4)]
    )
    monkeypatch.setattr(Runtime, "release_cached_memory", lambda self: None)
    monkeypatch.setattr(fleet, "agreed", lambda work, _caught: work())
    monkeypatch.setattr(fleet, "start_server", lambda spec, *_, **__: cores_of_servers.append(spec.job_cores))
    settings = ServerSettings(tensor_parallel=2)
    fleet.Fleet(ServerSpec(tmp_path, "bfloat16", settings, (1,), False, tmp_path, CACHE), third)
    assert cores_of_servers == [tuple(range(8))]


def test_servers_are_placed_on_existing_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank sees all GPUs of the machine or a named subset."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    third = Runtime(rank=2, world_size=4, local_rank=2, device=torch.device("cuda", 2))
    environments = started(monkeypatch, tmp_path, third, tensor_parallel=2)
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in environments] == ["2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    assert started(monkeypatch, tmp_path, third)[0]["CUDA_VISIBLE_DEVICES"] == "GPU-c"
    first = Runtime(rank=0, world_size=2, local_rank=0, device=torch.device("cuda", 0))
    apart: dict[str, Any] = {"placement": "disaggregated", "count": 2}
    assert [f["CUDA_VISIBLE_DEVICES"] for f in started(monkeypatch, tmp_path, first, **apart)] == ["GPU-c"]
    with pytest.raises(RunError, match="server 0 would need the GPUs 2 to 5, but a rank sees 4 GPUs"):
        started(monkeypatch, tmp_path, first, tensor_parallel=4, **apart)


def started_on_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hosts: Sequence[int], rank: int, **settings: Any
) -> list[ServerSpec]:
    """Return the specifications of the servers that a rank starts in a world on these machines."""
    specs: list[ServerSpec] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    address = [f"10.0.0.{host}" for host in hosts]

    def gathered(value: Any) -> list[Any]:
        if isinstance(value, str):
            return address
        _, cores = value
        return [(host, {10 * host + core for core in cores}) for host in hosts]

    def towards(to: str, _port: int) -> str:
        return "10.0.0.0" if to == "10.0.0.1" else "10.0.0.1" if hosts[rank] else "127.0.1.1"

    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setattr(fleet, "all_gather_objects", gathered)
    monkeypatch.setattr(fleet, "address_towards", towards)
    monkeypatch.setattr(fleet, "listening_problem", lambda *_: None)
    monkeypatch.setattr(fleet, "agreed", lambda work, *_caught: work())
    monkeypatch.setattr(Runtime, "release_cached_memory", lambda self: None)
    monkeypatch.setattr(fleet, "start_server", lambda spec, *_, **__: specs.append(spec))
    runtime = Runtime(rank=rank, world_size=len(hosts), local_rank=0, device=torch.device("cpu"))
    fleet.Fleet(ServerSpec(tmp_path, "float32", ServerSettings(**settings), (1,), False, tmp_path, CACHE), runtime)
    return specs


def test_servers_listen_on_addresses_reachable_by_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Servers listen on the interface towards other machines, even if the name of the first machine resolves to
    loopback. On a single machine, servers listen on loopback."""
    for rank, expected in ((0, ("10.0.0.0", "10.0.0.0")), (1, None)):
        specs = started_on_machines(monkeypatch, tmp_path, [0, 1], rank)
        assert [(spec.host, spec.address) for spec in specs] == ([expected] if expected else [])
    (first,) = started_on_machines(monkeypatch, tmp_path, [0, 1, 0], 0)
    assert first.job_cores == first.cores == (0, 1), "only cores of ranks on the same machine"
    (alone,) = started_on_machines(monkeypatch, tmp_path, [0, 0], 0)
    assert (alone.host, alone.address) == ("127.0.0.1", "")
    (everywhere,) = started_on_machines(monkeypatch, tmp_path, [0, 1], 0, host="0.0.0.0")
    assert (everywhere.host, everywhere.address) == ("0.0.0.0", "10.0.0.0")
    with pytest.raises(
        RunError, match=r"host is 127.0.0.1 \(which is reachable only from this machine\), and the trainers"
    ):
        started_on_machines(monkeypatch, tmp_path, [0, 1], 0, host="127.0.0.1")
    with pytest.raises(
        RunError, match="rollout.servers.nodes is 2, but the trainers have 1 machine; start the trainers on"
    ):
        started_on_machines(monkeypatch, tmp_path, [0, 0], 0, tensor_parallel=2, nodes=2)


@pytest.mark.parametrize(("count", "expected"), [(1, [(0, 1)]), (2, [(0,), (1,)]), (4, [(0,), (1,), (0, 1), (0, 1)])])
def test_cpu_servers_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, expected: list[tuple[int, ...]]
) -> None:
    """Servers get separate cores while enough cores are free. Further servers use all cores."""
    settings: dict[str, Any] = {"placement": "disaggregated", "count": count}
    specs = [spec for r in (0, 1) for spec in started_on_machines(monkeypatch, tmp_path, [0, 0], r, **settings)]
    assert [spec.cores for spec in sorted(specs, key=lambda spec: spec.seed)] == expected
    assert [spec.seed for spec in sorted(specs, key=lambda spec: spec.seed)] == list(range(count))


@pytest.mark.parametrize("user_settings", [{}, {"NCCL_NVLS_ENABLE": "1"}])
def test_trainers_and_servers_share_nccl_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user_settings: dict[str, str]
) -> None:
    """The defaults equal the values that SGLang sets. A value from the user applies to both."""
    for name in nccl.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in user_settings.items():
        monkeypatch.setenv(name, value)
    spec = ServerSpec(tmp_path, "float32", ServerSettings(), (1,), False, tmp_path, CACHE)
    server = spec.environment(tmp_path)
    assert {name: server[name] for name in nccl.SETTINGS} == nccl.SETTINGS | user_settings
    trainer = dict(os.environ)
    nccl.share_settings(trainer)
    assert {name: trainer[name] for name in nccl.SETTINGS} == nccl.SETTINGS | user_settings
    labels = json.loads(spec.arguments(1, "k")["extra-metric-labels"])
    assert nccl.read_labels(labels) == nccl.own_stack(trainer)


@pytest.mark.parametrize(("sglang", "expected"), [("{}", False), ("{placement: disaggregated, count: 1}", True)])
def test_trainers_without_server_group_keep_nccl_defaults(
    monkeypatch: pytest.MonkeyPatch, sglang: str, expected: bool
) -> None:
    """By default, NCCL can reduce in the switches of NVLink."""
    config = load_config(ROOT / "configs/sglang_quickstart.yaml", [f"rollout.servers={sglang}"])
    with_servers_values: list[bool] = []

    def start(_settings: Any, _deadlines: Any, *, with_servers: bool) -> None:
        with_servers_values.append(with_servers)
        raise RunError("that is all")

    monkeypatch.setattr(run, "start_runtime", start)
    with pytest.raises(RunError, match="that is all"):
        run.train(SimpleNamespace(config=config, deadlines=None))  # type: ignore[arg-type]
    assert with_servers_values == [expected]


@pytest.mark.parametrize(
    ("overrides", "on_cpu", "on_gpu"),
    [
        ([], True, False),
        (["rollout.when_stopped=keep"], True, True),
        (["rollout.servers.deterministic=true"], True, True),
        (["rollout.servers.deterministic=false"], False, False),
    ],
)
def test_seeds_are_used_when_cheap_or_required(overrides: list[str], on_cpu: bool, on_gpu: bool) -> None:
    """SGLang uses seeds only with deterministic inference, which samples in torch. Otherwise SGLang uses another
    sampler."""
    config = load_config(ROOT / "configs/sglang_quickstart.yaml", overrides)
    for on_cuda, expected in ((False, on_cpu), (True, on_gpu)):
        spec = ServerSpec.of(config, TINY, (1,), on_cuda=on_cuda, device_bytes=80e9 * on_cuda)
        arguments = replace(spec, devices=(0,) if on_cuda else ()).arguments(1, "k")
        assert arguments.get("enable-deterministic-inference", False) is expected
        assert arguments.get("sampling-backend") == ("pytorch" if expected else None)


def test_sleeping_server_gets_no_expandable_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_memory_saver does not support expandable segments. The variables of the trainer do not change."""
    ours = "max_split_size_mb:128, expandable_segments:True,roundup_power2_divisions:[256:1,>:4]"
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, ours)
    awake = ServerSpec(tmp_path, "bfloat16", ServerSettings(), (1,), False, tmp_path, CACHE, devices=(0,))
    asleep = replace(awake, memory_saver=True)
    for name in names:
        assert awake.environment(tmp_path)[name] == os.environ[name] == ours
        assert asleep.environment(tmp_path)[name] == "max_split_size_mb:128,roundup_power2_divisions:[256:1,>:4]"


def test_external_servers_have_unknown_cache_size() -> None:
    overrides = ["rollout.servers={placement: disaggregated, urls: ['http://a:1'], memory_fraction: 0.1}"]
    config = load_config(ROOT / "configs/sglang_quickstart.yaml", overrides)
    spec = ServerSpec.of(config, TINY, (1,), on_cuda=True, device_bytes=1e6)
    assert (spec.cache.tokens, spec.cache.longest_tokens) == (None, config.max_sequence_tokens)


SHAPE = ModelShape("llama", 64, 2, 4, 2, 16, 256, 16, 32, False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine=transformers", "rollout.ahead=1"], "does not generate while the trainer computes"),
        (["rollout.dtype=bfloat16"], "rollout.dtype is bfloat16"),
        (["rollout.ahead=1"], "set it to corrected or bypass"),
        (["rollout.when_stopped=keep", "rollout.servers.deterministic=false"], "long responses are sampled again"),
        (["rollout.servers.tensor_parallel=3"], "rollout.servers.tensor_parallel 3 does not divide"),
        (
            ["rollout.servers={tensor_parallel: 4, nodes: 3}"],
            "rollout.servers.nodes 3 does not divide tensor_parallel 4; the nearest is 2 or 4",
        ),
        (
            ["rollout.servers={tensor_parallel: 4, data_parallel_attention: 3}"],
            "rollout.servers.data_parallel_attention 3 does not divide tensor_parallel 4; the nearest is 2 or 4",
        ),
        (
            ["rollout.servers={tensor_parallel: 2, data_parallel_attention: 4}"],
            "rollout.servers.data_parallel_attention 4 does not divide tensor_parallel 2; the nearest is 2",
        ),
        (
            ["rollout.servers={tensor_parallel: 2, data_parallel_attention: 2}"],
            "is 2, which SGLang supports for qwen3 or qwen3_moe, but not for llama",
        ),
        (
            ["rollout.servers.arguments={attn-dp-size: 2}"],
            "has attn-dp-size, which follows from rollout.servers.data_parallel_attention; remove it, and set that",
        ),
        (["rollout.servers.arguments={pp_size: 2}"], "has pp_size, and a server in pipeline stages cannot be sent"),
        (["rollout.servers.arguments={load-format: auto}"], "has load-format, but a run sends its servers the actor's"),
        (
            ["rollout.servers.environment={OMP_NUM_THREADS: 4}"],
            "has OMP_NUM_THREADS, which follows from rollout.servers.th",
        ),
        (["rollout.servers.environment={RANK: 1}"], "has RANK, but a run decides it for its own servers; remove it"),
        (["rollout.servers.environment={'A B': x}"], "has 'A B', which is no name of a variable; correct the name"),
        (
            ["rollout.servers.environment={SGLANG_RETURN_ORIGINAL_LOGPROB: 1}"],
            "log-probabilities would differ from those of the sampling distribution",
        ),
        (
            ["rollout.servers={placement: disaggregated, urls: ['http://a:1'], environment: {A: b}}"],
            "rollout.servers.environment is for servers of the run, but urls name external servers; remove it",
        ),
        (
            ["rollout.servers.arguments={speculative-algorithm: NEXTN}"],
            "has speculative-algorithm NEXTN, but a run sends only the actor's weights and no weights of draft layers",
        ),
        (["rollout.servers.arguments={nnodes: 2}"], "has nnodes, which follows from rollout.servers.nodes; remove it"),
    ],
)
def test_conflicting_settings_are_rejected(overrides: list[str], message: str) -> None:
    config = load_config(ROOT / "configs/sglang_quickstart.yaml", overrides)
    assert any(message in problem for problem in (*engine_rules(config), *server_rules(config, SHAPE)))


def test_drafts_without_weights_are_allowed() -> None:
    drafts = "rollout.servers.arguments={speculative-algorithm: NGRAM}"
    assert not list(server_rules(load_config(ROOT / "configs/sglang_quickstart.yaml", [drafts]), SHAPE))


def test_heads_are_split_within_attention_groups() -> None:
    overrides = ["rollout.servers={tensor_parallel: 8, data_parallel_attention: 4}"]
    config, shape = load_config(ROOT / "configs/sglang_quickstart.yaml", overrides), replace(SHAPE, family="qwen3")
    assert not list(server_rules(config, shape))
    (problem,) = server_rules(config, replace(shape, tied_embeddings=True))
    assert "data_parallel_attention is 4, but the model's embedding is its output layer" in problem
    arguments = ServerSpec.of(config, TINY, (1,), on_cuda=False).arguments(1, "")
    assert (arguments["tensor-parallel-size"], arguments["attn-dp-size"]) == (8, 4)
    assert not config.rollout.server_settings.takes_slices


def test_external_server_must_return_routed_experts() -> None:
    check_routing("server 0", {"enable_return_routed_experts": True}, wanted=True)
    check_routing("server 0", {}, wanted=False)
    others: tuple[ServerInfo, ...] = ({}, {"enable_return_routed_experts": False})
    for info in others:
        with pytest.raises(EngineError, match="server 0 does not return .* or set algorithm.router_replay to false"):
            check_routing("server 0", info, wanted=True)


def test_server_with_other_sampling_distribution_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[ServerInfo, str]] = [
        ({"speculative_algorithm": "NGRAM", "speculative_accept_threshold_single": 0.5}, "accepts drafts"),
        ({"speculative_algorithm": "NGRAM", "speculative_accept_threshold_acc": 0.9}, "accepts drafts"),
        ({"allow_auto_truncate": True}, "start the server without --allow-auto-truncate"),
    ]
    for info, message in cases:
        with pytest.raises(EngineError, match=f"server 0 .*{message}"):
            check_sampling("server 0", info)
    check_sampling("server 0", {"speculative_accept_threshold_single": 0.5})
    check_sampling("server 0", {"preferred_sampling_params": {"top_k": 2}})
    assert "has --preferred-sampling-params {'top_k': 2}, which have no effect" in capsys.readouterr().err


def test_minimum_response_length_requires_server_hooks() -> None:
    check_hooks("server 0", {"extra_metric_labels": None}, has_least_tokens=False)
    check_hooks("server 0", {"extra_metric_labels": {"megappo_hooks": "1"}}, has_least_tokens=True)
    for labels in (None, {"megappo_torch": "2.14.1"}):
        with pytest.raises(EngineError, match="server 0 counts rollout.min_response_tokens from 0 .* set .* to 0"):
            check_hooks("server 0", {"extra_metric_labels": labels}, has_least_tokens=True)


def test_servers_have_room_for_the_last_position(tmp_path: Path) -> None:
    """SGLang reserves 6 positions. The server of a judge has the context length of its model."""
    sizes = "{max_total_tokens: 32, threads: 1}"
    overrides = ["data.max_prompt_tokens=29", f"rollout.servers={sizes}"]
    spec = ServerSpec.of(load_config(ROOT / "configs/sglang_quickstart.yaml", overrides), TINY, (1,), on_cuda=False)
    arguments, environment = spec.arguments(1, "key"), spec.environment(tmp_path)
    assert arguments["context-length"] == arguments["max-total-tokens"] == 40
    assert environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
    assert replace(spec, cache=PlannedCache(500, 32)).arguments(1, "key")["max-total-tokens"] == 500
    judge = replace(spec, called="judge", positions=None)
    assert "context-length" not in judge.arguments(1, "key") and judge.arguments(1, "key")["max-total-tokens"] == 32
    check_lengths("server 0", {}, 32)
    check_lengths("server 0", {"max_req_input_len": 34}, 32)
    with pytest.raises(EngineError, match="server 0 rejects inputs of 26 tokens and more, .* have 32 tokens; .* by 6$"):
        check_lengths("server 0", {"max_req_input_len": 26}, 32)
    check_lengths("server 0", {"max_total_num_tokens": 160, "page_size": 64}, 32)
    with pytest.raises(
        EngineError, match="server 0 has room for .* 128 tokens in pages of 64, and needs 160 tokens for"
    ):
        check_lengths("server 0", {"max_total_num_tokens": 128, "page_size": 64}, 32)


def test_expert_placement_argument_is_rejected() -> None:
    config = load_config(ROOT / "configs/sglang_quickstart.yaml", ["rollout.servers.arguments={ep-size: 2}"])
    for shape in (SHAPE, replace(SHAPE, experts=8)):
        assert any("rollout.servers.arguments has ep-size" in problem for problem in server_rules(config, shape))


def test_managed_arguments_are_rejected_under_every_alias() -> None:
    parser = argparse.ArgumentParser()
    pytest.importorskip("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    names = {name.lstrip("-"): action.dest for action in parser._actions for name in action.option_strings}
    short = {"tp": "tp_size", "pp": "pp_size", "dp": "dp_size"}  # unambiguous prefixes that argparse accepts
    refused = {name for group in (*OWNED.values(), *REFUSED) for name in group}
    owned = {(names | short)[name] for name in refused}
    assert {name for name, destination in (names | short).items() if destination in owned} == refused
    settings = {
        name for section in ("rollout.servers", "algorithm", "model", "run", "runtime") for name in fields(section)
    }
    assert set(OWNED) <= settings
    for name in refused:
        for alias in (name, f"--{name}", name.replace("-", "_")):
            assert len(list(word_rules(ServerSettings(arguments={alias: 1})))) == 1, alias


def fields(section: str) -> set[str]:
    """Return the full names of the settings in a section."""
    section_type: Any = Config
    for name in section.split("."):
        section_type = {"servers": ServerSettings}.get(name) or section_type.model_fields[name].annotation
    return {f"{section}.{name}" for name in section_type.model_fields}


def test_servers_get_only_configured_sglang_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["rollout.servers.environment={SGLANG_LOG_GC: 1, SGLANG_USE_AITER: 'false'}"]
    config = load_config(ROOT / "configs/sglang_quickstart.yaml", overrides)
    assert not list(server_rules(config, SHAPE))
    monkeypatch.setenv("SGLANG_USE_AITER", "true")
    monkeypatch.setenv("SGLANG_SET_IN_A_SHELL", "1")
    environment = ServerSpec.of(config, TINY, (1,), on_cuda=False).environment(tmp_path)
    assert (environment["SGLANG_LOG_GC"], environment["SGLANG_USE_AITER"]) == ("1", "false")
    assert "SGLANG_SET_IN_A_SHELL" not in environment
    assert unheard_variables(os.environ) == ["SGLANG_SET_IN_A_SHELL", "SGLANG_USE_AITER"]


def test_ignored_sglang_variables_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_SET_IN_A_SHELL", "1")
    for rank in (0, 1):
        started_on_machines(monkeypatch, tmp_path, [0, 0], rank)
    message = "megappo: the SGLang servers do not receive SGLANG_SET_IN_A_SHELL, which is set in the environment; set"
    assert capsys.readouterr().err.count(message) == 1


@pytest.mark.parametrize(
    ("tp", "ep", "experts", "message"),
    [
        (2, 2, 0, "expert_parallel 2, but the actor model has no experts; set it to 1"),
        (4, 3, 9, "expert_parallel 3 does not divide rollout.servers.tensor_parallel 4; the nearest is 1"),
        (4, 4, 6, "tensor_parallel 4 and 6 (experts); the nearest is 2"),
        (16, 1, 8, "1 splits each expert between 16 ranks, which do not divide the 24 (FFN hidden size)"),
        (4, 2, 8, ""),
    ],
)
def test_server_ranks_split_experts(tp: int, ep: int, experts: int, message: str) -> None:
    sizes = [f"rollout.servers.tensor_parallel={tp}", f"rollout.servers.expert_parallel={ep}"]
    config = load_config(ROOT / "configs/sglang_quickstart.yaml", sizes)
    shape = replace(SHAPE, experts=experts, heads=16, kv_heads=16, ffn_hidden_size=24 if experts else 32)
    problems = list(server_rules(config, shape))
    assert len(problems) == bool(message) and message in "".join(problems)
    assert ServerSpec.of(config, TINY, (1,), on_cuda=False).arguments(1, "").get("ep-size", 1) == ep


def test_readme_example_is_valid() -> None:
    text = (ROOT / "megappo" / "engines" / "README.md").read_text()
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])["rollout"]
    overrides = [f"rollout.{name}={json.dumps(value)}" for name, value in settings.items()]
    config = load_config(ROOT / "configs/sglang_quickstart.yaml", overrides)
    assert config.rollout.server_settings.count == 2
    assert not list(server_rules(config, SHAPE))


def test_shipped_settings_are_valid() -> None:
    for name in ("sglang_quickstart", "sglang_disaggregated", "quickstart"):
        assert not list(server_rules(load_config(ROOT / f"configs/{name}.yaml"), SHAPE))


@pytest.mark.parametrize(
    ("sglang", "message"),
    [
        ("{urls: ['http://a:1']}", "set placement: disaggregated"),
        ("{urls: ['http://a:1'], placement: disaggregated, count: 2}", "external servers; set count to null"),
        ("{urls: ['a:1'], placement: disaggregated}", "must look like http://HOST:PORT"),
        (
            "{urls: ['http://a:1'], placement: disaggregated, nodes: 2}",
            "nodes 2 is for own servers, but urls name external",
        ),
    ],
)
def test_invalid_server_settings_are_rejected(sglang: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(ROOT / "configs/sglang_quickstart.yaml", [f"rollout.servers={sglang}"])


class EngineParameters(torch.nn.Module):
    """The parameters of an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.full((3, 2, 4), 7.0))
        self.rows = torch.nn.Parameter(torch.full((4, 2), 7.0))


def test_slices_are_loaded_with_zero_padding() -> None:
    """The slices are one expert of a parameter with three, and three rows of a vocabulary padded to four."""
    engine, flat = EngineParameters(), torch.arange(14.0)
    places = [SlicePlace("experts", 2, 3, 0, "float32", 0, 32), SlicePlace("rows", 0, 1, 2, "float32", 32, 56)]
    load_slices(engine, [(describe(places), flat.view(torch.uint8))])
    assert torch.equal(engine.experts[2], flat[:8].view(2, 4)) and (engine.experts[:2] == 7).all()
    assert engine.rows.tolist() == [[8, 9], [10, 11], [12, 13], [0, 0]]


class Derived(EngineParameters):
    """An engine that also stores a value derived from its parameters, as for latent attention."""

    made = 0.0

    def post_load_weights(self, is_nextn: bool = False, weight_names: Any = None) -> None:
        assert weight_names == {"rows"} and not is_nextn
        self.made = float(self.rows.detach().sum())


def test_derived_values_follow_new_parameters() -> None:
    engine, flat = Derived(), torch.arange(8.0)
    load_slices(engine, [(describe([SlicePlace("rows", 0, 1, 0, "float32", 0, 32)]), flat.view(torch.uint8))])
    assert engine.made == 28


@pytest.mark.parametrize(
    ("slice_place", "message"),
    [
        (SlicePlace("columns", 0, 1, 0, "float32", 0, 32), "the engine has no parameter columns"),
        (SlicePlace("rows", 0, 1, 0, "float32", 0, 28), "holds rows as .4, 2. of torch.float32, not as 7 elements"),
        (
            SlicePlace("rows", 0, 1, 0, "bfloat16", 0, 16),
            "not as 8 elements of torch.bfloat16; remove arguments",
        ),
        (SlicePlace("experts", 1, 4, 0, "float32", 0, 32), "not as 32 elements of torch.float32"),
    ],
)
def test_slices_of_another_layout_are_rejected(slice_place: SlicePlace, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_slices(EngineParameters(), [(describe([slice_place]), torch.arange(14.0).view(torch.uint8))])


@pytest.mark.parametrize(
    ("version", "settings", "sliced"),
    [
        ("0.5.23", {"tensor_parallel": 2}, True),
        ("0.5.24", {"tensor_parallel": 2}, False),
        ("0.5.23", {"tensor_parallel": 2, "verify": False}, False),
        ("0.5.23", {}, False),
        ("0.5.23", {"tensor_parallel": 2, "placement": "disaggregated"}, False),
    ],
)
def test_slice_loader_requires_a_known_layout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, settings: dict[str, Any], sliced: bool
) -> None:
    """A server with an unknown layout receives whole tensors."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    server_settings = ServerSettings(**settings)
    spec = ServerSpec(tmp_path, "float32", server_settings, (1,), False, tmp_path, CACHE)
    monkeypatch.setattr(
        "megappo.engines.sglang.servers.spec.own_stack", lambda _environment: SimpleNamespace(labels=dict)
    )
    assert spec.arguments(1, "k").get("custom-weight-loader") == ([LOADER] if sliced else None)


class OnCuda(Tensor):
    """A CPU tensor that reports a GPU as its device."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def opened(*arguments: Any) -> tuple[Any, ...]:
    """Return the arguments for opening the tensor in another process."""
    return arguments


def test_cuda_handle_has_device_uuid_and_no_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server numbers devices in another order. A restarted server cannot open torch's events (tests/gpu, `server-
    killed`)."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[6] == "storage_device" and names[-1] == "event_sync_required"
    reduced = (opened, (*names[:6], 3, *names[7:-1], True))
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: reduced)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=f"uuid of {n}"))
    payload: dict[str, torch.Tensor | list[SimpleNamespace]] = {
        "flattened_tensor": torch.zeros(2).as_subclass(OnCuda),
        "metadata": [SimpleNamespace(numel=2)],
    }
    message = pickle.loads(base64.b64decode(serialize(payload)))
    handle = (*names[:6], "uuid of 3", *names[7:-1], False)
    assert message == {"flattened_tensor": handle, "metadata": [SimpleNamespace(numel=2)]}
    patched = pytest.importorskip("sglang.srt.utils.patch_torch")  # the server's own reader
    assert patched._REDUCE_TENSOR_ARG_DEVICE_INDEX == 6
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert patched._device_from_maybe_uuid("uuid of 3") == 3
