"""The map between Hugging Face tensors and Megatron shards, without processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.config.grid import Grid
from megappo.errors import RunError
from megappo.families import FAMILIES, architecture
from megappo.families.architecture import padded_vocab_size
from megappo.families.declaration import ArchitectureConfig
from megappo.families.flops import SampleCost
from megappo.families.parameters import (
    Piece,
    expert_parameters,
    expert_share,
    model_parameters,
    multiplied_parameters,
    pieces,
    shard_shape,
    tensor_shapes,
)
from megappo.families.weights import read_shard, scatter_shard
from megappo.megatron.build import BuildOptions, RoleModel
from megappo.megatron.roles import LocalRole, Placement
from megappo.reshard import stream
from megappo.reshard.sources import RandomSource, SafetensorsSource
from megappo.reshard.stream import WeightStream
from megappo.runtime.process import Runtime
from tests.support.fake_world import fake_world
from tests.support.models import VOCAB, stored_parameters, write_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_sharding_and_joining_restores_the_model(tmp_path: Path, family: str, tied: bool, tp: int) -> None:
    folder = write_model(tmp_path / "m", family, 1, tie_word_embeddings=tied)
    arch = architecture(AutoConfig.from_pretrained(folder))
    reference = dict(stored_parameters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))
    source = SafetensorsSource(folder, arch)
    vocab = padded_vocab_size(VOCAB, tp, 8)
    joined: dict[str, torch.Tensor] = {}
    for entry in model_parameters(arch):
        whole = {n: torch.full(shape, float("nan")) for n, shape in entry.tensors.items()}
        for rank in range(tp):
            like = torch.empty(shard_shape(arch, entry, tp, vocab))
            shard = read_shard(source, arch, entry, like, rank, tp, vocab)
            scatter_shard(shard, pieces(arch, entry, rank, tp, vocab), whole)
        joined |= whole
    assert joined.keys() == reference.keys()
    assert tensor_shapes(arch, output_layer=False).keys() == reference.keys() - {"lm_head.weight"}
    for name, tensor in joined.items():
        assert torch.equal(tensor, reference[name]), name


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_sharding_and_storage_of_parameters(tmp_path: Path, family: str) -> None:
    """Matrices that read the input of a layer are split by outputs, and matrices that write the output by inputs.
    Experts and norms are not split. Checkpoints store query, key and value in one tensor, and gate and up
    separately."""
    arch = architecture(AutoConfig.from_pretrained(write_model(tmp_path / "m", family, 1)))
    for entry in model_parameters(arch):
        last = entry.hf[0].split(".")[-2]
        whole = "norm" in last or last == "gate" or ".experts." in entry.hf[0]
        assert entry.axis == (None if whole else int(last in ("o_proj", "down_proj"))), entry.megatron
        if last == "q_proj":
            assert entry.stored == {entry.hf[0].replace("q_proj", "qkv_proj"): entry.hf}
        else:
            assert entry.stored == {name: (name,) for name in entry.hf}


def test_shard_has_consecutive_groups_of_heads(tmp_path: Path) -> None:
    """The model has four groups of two query heads, one key and one value with 8 channels. The second of two ranks
    has the last two groups."""
    folder = write_model(tmp_path / "m", "llama", 1, hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    arch = architecture(AutoConfig.from_pretrained(folder))
    entry = next(p for p in model_parameters(arch) if p.kind == "qkv")
    rows = (("q", 32, 48), ("k", 16, 24), ("v", 16, 24), ("q", 48, 64), ("k", 24, 32), ("v", 24, 32))
    expected = [Piece(f"model.layers.0.self_attn.{name}_proj.weight", 0, start, stop) for name, start, stop in rows]
    assert pieces(arch, entry, 1, 2, VOCAB + 1) == expected
    assert shard_shape(arch, entry, 2, VOCAB + 1) == (64, 64)
    assert entry.engine_name == "model.layers.0.self_attn.qkv_proj.weight"
    alone = next(p for p in model_parameters(arch) if p.kind == "row")
    assert alone.engine_name == alone.hf[0] == "model.layers.0.self_attn.o_proj.weight"


def test_random_weights_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    arch = architecture(AutoConfig.from_pretrained(write_model(tmp_path / "m", "qwen3", 1)))
    entry = next(p for p in model_parameters(arch) if p.kind == "column")
    whole = read_shard(RandomSource(arch, 3), arch, entry, torch.empty(shard_shape(arch, entry, 1, VOCAB)), 0, 1, VOCAB)
    half = read_shard(
        RandomSource(arch, 3), arch, entry, torch.empty(shard_shape(arch, entry, 2, VOCAB + 1)), 1, 2, VOCAB + 1
    )
    gate, up = whole.chunk(2)
    assert torch.equal(half, torch.cat([gate[24:], up[24:]]))
    assert abs(float(whole.std()) - arch.initializer_range) < 0.02
    other = read_shard(RandomSource(arch, 4), arch, entry, whole, 0, 1, VOCAB)
    assert not torch.equal(other, whole)


def test_experts_are_distributed_without_splits(tmp_path: Path) -> None:
    arch = architecture(AutoConfig.from_pretrained(write_model(tmp_path / "m", "qwen3_moe", 1)))
    experts = [p for p in model_parameters(arch) if p.expert is not None]
    assert sum(p.elements for p in experts[:2]) == expert_parameters(arch)
    assert all(shard_shape(arch, p, 4, VOCAB + 1) == shard_shape(arch, p, 1, VOCAB) for p in experts)
    assert [expert_share(arch, p, 4) for p in experts[::2] if p.layer == 1] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {expert_share(arch, p, 4) for p in model_parameters(arch) if p.expert is None} == {None}
    every = sum(p.elements for p in model_parameters(arch))
    # A token uses two of eight experts. The embedding is only a lookup.
    assert multiplied_parameters(arch) == every - 4 * 6 * expert_parameters(arch) - VOCAB * 32


FUSED = {"input_layernorm": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_"}


def model_with(arch: ArchitectureConfig, names: Iterable[str]) -> RoleModel:
    """Return a model of one chunk with empty parameters of these names."""
    chunk: Any = nn.Module()
    for name in names:
        *path, last = name.split(".")
        place = chunk
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, nn.Parameter(torch.empty(0)))
    layers: Any = nn.ModuleList(chunk.decoder.layers.children())
    for number, layer in enumerate(layers):
        layer.layer_number = number + 1
    chunk.decoder.layers = layers
    chunk.pre_process = chunk.post_process = True
    layout: Any = None
    options = BuildOptions(torch.float32, torch.device("cpu"), VOCAB)
    return RoleModel(arch, layout, options, layout, cast("list[Any]", [chunk]))


def transformer_engine_names(arch: ArchitectureConfig) -> list[str]:
    """Return the parameter names for layers with norms that are fused into linear layers."""
    names = [p.megatron for p in model_parameters(arch)]
    for norm, fused in FUSED.items():
        names = [name.replace(f"{norm}.", fused) for name in names]
    return names


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> ArchitectureConfig:
    """Return an architecture with the 291 tensor names of Llama 3 8B and small shapes."""
    folder = write_model(tmp_path_factory.mktemp("8b"), "llama", 1)
    return dataclasses.replace(architecture(AutoConfig.from_pretrained(folder)), layers=32)


def test_transformer_engine_names_map_to_all_parameters(llama_8b: ArchitectureConfig) -> None:
    names = transformer_engine_names(llama_8b)
    assert len(set(names) - {p.megatron for p in model_parameters(llama_8b)}) == 64
    model = model_with(llama_8b, names)
    model.check_names()
    entries = [parameter.entry for parameter in model.local_parameters()]
    assert entries == list(model_parameters(llama_8b))
    assert sum(len(p.hf) for p in entries) == 291


def test_unknown_parameter_is_an_error(llama_8b: ArchitectureConfig) -> None:
    names = [*transformer_engine_names(llama_8b), "decoder.layers.3.mlp.linear_fc1.layer_norm_bias"]
    with pytest.raises(RunError, match=r"parameters that are not in the map, such as decoder.layers.3.*norm_bias"):
        model_with(llama_8b, names).check_names()


def test_missing_parameter_is_an_error(llama_8b: ArchitectureConfig, world_of_one: None) -> None:
    names = [name for name in transformer_engine_names(llama_8b) if "layers.7.mlp.linear_fc1.layer" not in name]
    model = model_with(llama_8b, names)
    message = r"too few parameters for the map, such as decoder.layers.7.pre_mlp_layernorm.weight"
    with pytest.raises(RunError, match=message):
        model.check_names()
    role = LocalRole(
        Placement("actor", Grid((0,), 1, 1), 1, 1, SampleCost(1, 0)), model, Runtime(0, 1, 0, torch.device("cpu"))
    )
    with pytest.raises(RunError, match=r"no rank has decoder.layers.7.pre_mlp_layernorm.weight of the model"):
        WeightStream(role, 1 << 30)


def test_only_the_first_replica_sends_names(llama_8b: ArchitectureConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the gathered names does not grow with the world size."""
    model = model_with(llama_8b, transformer_engine_names(llama_8b))
    names = [parameter.entry.megatron for parameter in model.local_parameters()]
    sent: list[list[str]] = []

    def record(own: list[str]) -> list[list[str]]:
        sent.append(own)
        return [names] * 8

    monkeypatch.setattr(stream, "all_gather_objects", record)
    for rank in range(8):
        with fake_world(rank, 8):
            runtime = Runtime(rank, 8, 0, torch.device("cpu"))
            grid = Grid(range(8), 2, 1, cp=2)
            WeightStream(LocalRole(Placement("actor", grid, 1, 1, SampleCost(1, 0)), model, runtime), 1 << 30)
    assert sent == [names] + [[]] * 7


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_padding_rows_are_zero(tmp_path: Path) -> None:
    arch = architecture(AutoConfig.from_pretrained(write_model(tmp_path / "m", "llama", 1)))
    entry = next(iter(model_parameters(arch)))
    like = torch.empty(80, 32)
    shard = read_shard(RandomSource(arch, 3), arch, entry, like, 1, 2, 160)
    assert (shard[: VOCAB - 80] != 0).any()
    assert (shard[VOCAB - 80 :] == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 64}, "do not fit the configuration"),
        ({"num_hidden_layers": 5}, "has no tensor 'model.layers.4"),
    ],
)
def test_mismatched_weights_are_reported(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    folder = write_model(tmp_path / "m", "llama", 1)
    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    arch = architecture(config)
    source = SafetensorsSource(folder, arch)
    with pytest.raises(ValueError, match=message):
        for entry in model_parameters(arch):
            for piece in pieces(arch, entry, 0, 1, VOCAB):
                source.read(piece)


def test_folder_without_weights_is_rejected(tmp_path: Path) -> None:
    arch = architecture(AutoConfig.from_pretrained(write_model(tmp_path / "m", "llama", 1)))
    with pytest.raises(ValueError, match="has no model.safetensors; save the model as safetensors"):
        SafetensorsSource(tmp_path, arch)
