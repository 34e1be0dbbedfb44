"""Checkpoint folders of Megatron-LM: equal weights after reading and writing, errors in one sentence, and no executed
code."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import signal
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig
from megatron.core.rerun_state_machine import RerunMode, RerunState
from megatron.core.transformer.enums import AttnBackend, CudaGraphScope
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megappo.checkpoint.torch_dist.source import TorchDistSource
from megappo.checkpoint.torch_dist.writer import write_torch_dist
from megappo.errors import RunError
from megappo.families.parameters import OUTPUT_LAYER, Piece, model_parameters, shard_shape
from megappo.families.weights import WeightSource, read_shard
from megappo.models.model_files import read_architecture
from megappo.ppo.assembly.origins import open_origin
from megappo.reshard.sources import SafetensorsSource
from tests.support.checkpoints import CALL, TRACES, Payload
from tests.support.models import VOCAB, write_model, write_value_model


def written(root: Path, folder: Path, role: str = "actor", dtype: torch.dtype = torch.float32) -> Path:
    """Write a folder of Megatron-LM with the weights of a folder of Hugging Face."""
    arch = read_architecture(folder)
    write_torch_dist(root / "megatron", arch, SafetensorsSource(folder, arch), dtype, role=role, step=3)
    return root / "megatron"


def assert_same(actual: WeightSource, expected: WeightSource, folder: Path, role: str = "actor") -> None:
    """Compare every shard of every tensor parallel layout bit by bit. With four ranks, one rank has only padding."""
    arch = read_architecture(folder)
    for parameter in model_parameters(arch):
        if role == "critic" and parameter.megatron == OUTPUT_LAYER:
            continue
        for tp in (1, 2) if parameter.kind != "vocab" else (1, 2, 4):
            vocab = VOCAB + 1 if tp < 4 else 4 * 64
            like = torch.empty(shard_shape(arch, parameter, tp, vocab))
            for rank in range(tp):
                shard = (arch, parameter, like, rank, tp, vocab)
                assert torch.equal(read_shard(actual, *shard), read_shard(expected, *shard)), (
                    parameter.megatron,
                    tp,
                    rank,
                )


@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", False), ("qwen2", True), ("qwen3", True), ("qwen3_moe", False), ("mistral", False), ("mixtral", False)],
)
def test_written_folders_are_read_again(tmp_path: Path, family: str, tied: bool) -> None:
    folder = write_model(tmp_path / "model", family, 3, num_hidden_layers=2, tie_word_embeddings=tied)
    path, arch = written(tmp_path, folder), read_architecture(folder)
    expected = SafetensorsSource(folder, arch)
    for role, text in (("actor", path), ("critic", f"{path}@release"), ("actor", path / "release")):
        origin = open_origin(str(text), role, arch)
        assert isinstance(origin.source, TorchDistSource)
        assert origin.summary == f"the {role} begins with {path / 'release'}"
        assert origin.source.value_head() is None
        assert_same(origin.source, expected, folder, role)


def test_critic_keeps_its_value_head(tmp_path: Path) -> None:
    folder = write_value_model(tmp_path / "model", "qwen3", 3, num_hidden_layers=2, tie_word_embeddings=True)
    path, arch = written(tmp_path, folder, "critic"), read_architecture(folder)
    expected, actual = SafetensorsSource(folder, arch), open_origin(str(path), "critic", arch).source
    assert_same(actual, expected, folder, "critic")
    heads = expected.value_head(), actual.value_head()
    assert heads[0] is not None and heads[1] is not None
    assert torch.equal(heads[0].weight, heads[1].weight) and torch.equal(heads[0].bias, heads[1].bias)
    with pytest.raises(ValueError, match=r"release contains a critic, with one value as output; use a language"):
        open_origin(str(path), "actor", arch)


def test_weights_keep_their_dtype(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama", 3, num_hidden_layers=2)
    path, arch = written(tmp_path, folder, dtype=torch.bfloat16), read_architecture(folder)
    parameter = next(p for p in model_parameters(arch) if p.kind == "row")
    like = torch.empty(shard_shape(arch, parameter, 2, VOCAB), dtype=torch.bfloat16)
    shard = (arch, parameter, like, 1, 2, VOCAB)
    actual, expected = open_origin(str(path), "actor", arch).source, SafetensorsSource(folder, arch)
    assert torch.equal(read_shard(actual, *shard), read_shard(expected, *shard))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a `model` of Hugging Face, and the same weights in `megatron`."""
    root = tmp_path_factory.mktemp("first")
    written(root, write_model(root / "model", "llama", 3, num_hidden_layers=2, tie_word_embeddings=False))
    return root


@pytest.fixture
def world(first: Path, tmp_path: Path) -> Path:
    """Return a copy that tests can change."""
    return shutil.copytree(first, tmp_path / "world")


def refused(world: Path, text: str = "", role: str = "actor", **changes: Any) -> str:
    """Return the error for a folder that does not match the changed architecture of a model."""
    arch = dataclasses.replace(read_architecture(world / "model"), **changes)
    TRACES.clear()
    with pytest.raises(ValueError, match=f"{role}.start_from") as error:
        open_origin(f"{world / 'megatron'}{text}", role, arch)
    assert not TRACES and "\n" not in str(error.value)
    return str(error.value)


def change_metadata(folder: Path, change: Callable[[Metadata], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def change_arguments(folder: Path, **changes: Any) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    vars(common["args"]).update(changes)
    for name in [name for name, value in changes.items() if value is NO_ARGUMENT]:
        delattr(common["args"], name)
    torch.save(common, folder / "common.pt")


def test_iterations_are_selected(world: Path) -> None:
    root = world / "megatron"
    (root / "release").rename(root / "iter_0000100")
    (root / "latest_checkpointed_iteration.txt").write_text("100\n")
    arch = read_architecture(world / "model")
    for text in ("", "@100"):
        assert "iter_0000100" in open_origin(f"{root}{text}", "actor", arch).summary
    assert "contains no checkpoint of iteration '7'; existing: 100; name an" in refused(world, "@7")
    assert "contains no checkpoint of iteration 'best'; existing: 100" in refused(world, "@best")
    (root / "latest_checkpointed_iteration.txt").write_text("soon")
    assert "contains 'soon', must be a number or release" in refused(world)
    (root / "latest_checkpointed_iteration.txt").write_text("200")
    assert "contains no checkpoint of iteration '200'; existing: 100" in refused(world)
    assert "is a single checkpoint of Megatron-LM; remove the part from the @ on" in refused(world, "/iter_0000100@100")


def test_other_formats_are_refused_by_name(world: Path) -> None:
    folder = world / "megatron/release"
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    assert "has format zarr 1, not torch_dist 1; load it with Megatron-LM and save it with" in refused(world)
    (folder / "metadata.json").write_text("{}")
    assert "metadata.json does not name a format (KeyError('sharded_backend'))" in refused(world)
    (folder / "metadata.json").unlink()
    assert "has Megatron-LM's format fsdp_dtensor or torch_dcp; load it" in refused(world)
    (folder / ".metadata").unlink()
    assert "contains no metadata.json and is unfinished" in refused(world)
    (folder / "mp_rank_00").mkdir()
    for text in ("", "/release"):
        assert "has Megatron-LM's format torch, with one file per rank; load it" in refused(world, text)


NO_ARGUMENT = object()
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a newer name": ({"norm_epsilon": NO_ARGUMENT, "layernorm_epsilon": 1e-5},
        "norm_epsilon 1e-05 (config.json: 1e-06)"),
    "layers": ({"num_layers": 7}, "num_layers 7 (config.json: 2)"),
    "several": (
        {"rotary_base": 500000, "norm_epsilon": 1e-5, "add_qkv_bias": True},
        "norm_epsilon 1e-05 (config.json: 1e-06), add_qkv_bias true (config.json: false), "
        "rotary_base 500000 (config.json: 10000.0); use a model",
    ),
    "experts": ({"num_experts": 8}, "num_experts 8 (config.json: null)"),
    "no groups": ({"group_query_attention": False}, "num_query_groups 4 (config.json: 2)"),
    "window": ({"window_size": (15, 0)}, "window_size (15, 0) (config.json: null)"),
    "untied": ({"untie_embeddings_and_output_weights": False},
        "untie_embeddings_and_output_weights false (config.json: true)"),
    "scaled rope": ({"use_rope_scaling": True}, "use_rope_scaling true (config.json: false)"),
    "an object": ({"normalization": AttnBackend.auto}, "normalization AttnBackend (config.json: 'RMSNorm')"),
    "latent attention": ({"multi_latent_attention": True}, "multi_latent_attention true (config.json: false)"),
    "tokens": ({"vocab_size": VOCAB + 5}, f"vocab_size {VOCAB + 5} (config.json: {VOCAB})"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_contradicting_arguments_are_reported(world: Path, name: str) -> None:
    changes, message = ARGUMENTS[name]
    change_arguments(world / "megatron/release", **changes)
    error = refused(world)
    assert f"its arguments contradict the actor's config.json: {message}" in error
    assert error.endswith("use a model of the same architecture")


def test_arguments_of_experts_are_compared(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3_moe", 3, num_hidden_layers=2)
    release = written(tmp_path, folder) / "release"
    change_arguments(release, moe_ffn_hidden_size=None, ffn_hidden_size=24)  # the value that Megatron-LM then uses
    open_origin(str(tmp_path / "megatron"), "actor", read_architecture(folder))
    change_arguments(release, moe_router_topk=4, moe_router_pre_softmax=True, ffn_hidden_size=48)
    message = (
        "moe_ffn_hidden_size 48 (config.json: 24), moe_router_topk 4 (config.json: 2), moe_router_pre_softmax true "
        "(config.json: false); use"
    )
    assert message in refused(tmp_path)


def test_equivalent_arguments_are_accepted(world: Path) -> None:
    """The arguments are as Megatron-LM writes them, with missing values and with all types of objects."""
    folder = world / "megatron/release"
    change_arguments(
        folder, rotary_base=10000, kv_channels=None, vocab_size=VOCAB - 4, make_vocab_size_divisible_by=128,
        attention_backend=AttnBackend.flash, model_type=ModelType.encoder_or_decoder, params_dtype=torch.bfloat16,
        exit_signal=signal.SIGTERM, data_path=[Path("data")], cuda_graph_scope=[CudaGraphScope.attn],
        yaml_cfg=SimpleNamespace(layers=SimpleNamespace(number=2)), device=torch.device("cpu"), sizes=torch.Size([2]),
    )  # fmt: skip
    common = torch.load(folder / "common.pt", weights_only=False)
    common |= {
        "optimizer": {"settings": OptimizerConfig(lr=1e-3), "step": torch.ones(3), "groups": OrderedDict(a=1)},
        "rerun_state_machine": {
            "mode": RerunMode.DISABLED,
            "state": RerunState.NOT_RUNNING_YET,
            "more": defaultdict(list),
        },
        "rng_state": [{"np_rng_state": np.random.get_state(), "bytes": b"\xff", "set": {1, 2}, "io": BytesIO(b"x")}],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(common, folder / "common.pt")
    open_origin(str(world / "megatron"), "actor", read_architecture(world / "model"))
    common["args"] = None
    torch.save(common, folder / "common.pt")
    open_origin(str(world / "megatron"), "actor", read_architecture(world / "model"))


def test_newer_checkpoints_have_arguments_in_a_shard(world: Path) -> None:
    """Megatron-Core 0.19 writes bytes into a shard, and no `common.pt`."""
    folder = world / "megatron/release"
    change_arguments(folder, num_layers=7)
    common = torch.load(folder / "common.pt", weights_only=False)
    (folder / "common.pt").unlink()
    assert "common.pt cannot be read: No such file" in refused(world)
    for content, message in (
        ([common], "num_layers 7 (config.json: 2)"),
        (Payload("read"), f"distcp names {CALL}, which Megatron-LM does not write"),
    ):
        archive = BytesIO()
        torch.save(content, archive)
        shard = folder / "__1_0.distcp"
        shard.write_bytes(b"before" + archive.getvalue() + b"behind")
        index = MetadataIndex("common_state/shard_0_1")
        place = _StorageInfo(shard.name, len(b"before"), len(archive.getvalue()))

        def add(metadata: Metadata, index: MetadataIndex = index, place: _StorageInfo = place) -> None:
            metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
            metadata.storage_data[index] = place

        change_metadata(folder, add)
        assert message in refused(world)


def test_larger_vocabulary_is_not_padding(world: Path) -> None:
    folder = world / "megatron/release"
    change_arguments(folder, vocab_size=None, make_vocab_size_divisible_by=4, tensor_model_parallel_size=1)
    error = refused(world, vocab_size=VOCAB - 5)
    assert f"{VOCAB} tokens, padded in steps of 4 (config.json: vocab_size {VOCAB - 5})" in error
    error = refused(world, vocab_size=VOCAB + 1)
    assert f"word_embeddings.weight' in {folder} has shape ({VOCAB}, 32), config.json requires at least" in error


def unknown_tensor(metadata: Metadata) -> None:
    norm = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    metadata.state_dict_metadata |= {
        "decoder.layers.mlp.router.expert_bias": norm, "optimizer.state.exp_avg.x": norm, "a._extra_state": norm,
        "rng_state/shard_0_1": BytesStorageMetadata(),
    }  # fmt: skip


def missing_tensor(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["decoder.layers.self_attention.linear_qkv.weight"]


def missing_part(metadata: Metadata) -> None:
    del chunks_of(metadata, "decoder.layers.mlp.linear_fc2.weight")[1]


def part_outside(metadata: Metadata) -> None:
    chunks_of(metadata, "decoder.layers.mlp.linear_fc2.weight")[1].sizes = torch.Size([3, 32, 48])


def part_nowhere(metadata: Metadata) -> None:
    chunks_of(metadata, "decoder.layers.mlp.linear_fc2.weight")[1].offsets = torch.Size([1, 1, 0])


def float8(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.properties = dataclasses.replace(entry.properties, dtype=torch.float8_e4m3fn)


def chunks_of(metadata: Metadata, key: str) -> list[Any]:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry.chunks


def in_another_folder(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../__0_0.distcp"


def a_call(metadata: Metadata) -> None:
    metadata.planner_data = Payload("read")


CRAFTED: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "unknown": (unknown_tensor, "contains decoder.layers.mlp.router.expert_bias, which a llama of its config.json"),
    "missing": (missing_tensor, "contains no tensor 'decoder.layers.self_attention.linear_qkv.weight'"),
    "missing part": (missing_part, "is damaged: 'decoder.layers.mlp.linear_fc2.weight' is incomplete"),
    "part outside": (part_outside, "is damaged: 'decoder.layers.mlp.linear_fc2.weight' has a part outside of the"),
    "part nowhere": (part_nowhere, "is damaged: 'decoder.layers.mlp.linear_fc2.weight' has a part without a location"),
    "float8": (float8, "is of type torch.float8_e4m3fn, which cannot be read; use weights of type torch.float64"),
    "another folder": (in_another_folder, ".metadata has invalid content (ValueError: tensors in '../__0"),
    "a call": (a_call, f".metadata names {CALL}, which no checkpoint contains"),
}


@pytest.mark.parametrize("how", CRAFTED)
def test_invalid_metadata_is_reported(world: Path, how: str) -> None:
    craft, message = CRAFTED[how]
    change_metadata(world / "megatron/release", craft)
    assert message in refused(world)


def test_differing_shapes_are_named(world: Path) -> None:
    """The shapes are also compared if the checkpoint has no arguments."""
    folder = world / "megatron/release"
    sentence = "its arguments contradict the actor's config.json: ffn_hidden_size 48 (config.json: 40); use"
    assert sentence in refused(world, ffn_hidden_size=40)
    torch.save({}, folder / "common.pt")
    message = f"'decoder.layers.mlp.linear_fc1.weight' in {folder} has shape (2, 96, 32), config.json requires (2, 80"
    assert message in refused(world, ffn_hidden_size=40)
    sentence = "contains output_layer.weight, which a llama of its config.json does not have"
    assert sentence in refused(world, tied_embeddings=True)
    open_origin(  # a critic has no output layer to tie
        str(world / "megatron"), "critic", dataclasses.replace(read_architecture(world / "model"), tied_embeddings=True)
    )


@pytest.mark.parametrize(
    "content", [Payload("read"), {"args": Payload("read")}, {"args": Namespace(x=Payload("read"))}], ids=range(3)
)
def test_unknown_class_is_refused_by_name(world: Path, content: Any) -> None:
    torch.save(content, world / "megatron/release/common.pt")
    message = f"common.pt names {CALL}, which Megatron-LM does not write"
    assert message in refused(world)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", pickle.dumps({}), None, "a list"], ids=range(5))
def test_invalid_common_file_is_reported(world: Path, content: bytes | str | None) -> None:
    path = world / "megatron/release/common.pt"
    if content is None:
        path.unlink()
    elif isinstance(content, str):
        torch.save([content], path)
    else:
        path.write_bytes(content)
    message = "cannot be read: No such file" if content is None else "has content that Megatron-LM does not"
    assert f"{path} {message}" in refused(world)


def test_truncated_files_are_reported(world: Path) -> None:
    path = world / "megatron/release/__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-7])
    assert "is damaged: __0_0.distcp has " in refused(world)
    path.unlink()
    assert "is damaged: __0_0.distcp is missing; fetch it again" in refused(world)


def test_rank_reads_its_parts_once(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reads nothing of other layers. A matrix with several requested slices is read once."""
    arch = read_architecture(first / "model")
    source = open_origin(str(first / "megatron"), "actor", arch).source
    load = Mock(wraps=torch.load)
    monkeypatch.setattr(torch, "load", load)
    for kind in ("qkv", "column", "row"):
        parameter = next(p for p in model_parameters(arch) if p.kind == kind and p.layer == 1)
        like = torch.empty(shard_shape(arch, parameter, 2, VOCAB))
        load.reset_mock()
        read_shard(source, arch, parameter, like, 1, 2, VOCAB)
        assert load.call_count == 1


def test_call_in_a_shard_is_not_run(world: Path) -> None:
    path = world / "megatron/release/__0_0.distcp"
    arch = read_architecture(world / "model")
    source = open_origin(str(world / "megatron"), "actor", arch).source
    metadata = pickle.loads((path.parent / ".metadata").read_bytes())
    place = next(p for i, p in metadata.storage_data.items() if i.fqn == "decoder.final_layernorm.weight")
    content = BytesIO()
    torch.save({"call": Payload("read"), "size": "x" * (place.length - 800)}, content)
    written = bytearray(path.read_bytes())
    assert len(content.getvalue()) <= len(written) - place.offset
    written[place.offset : place.offset + place.length] = content.getvalue().ljust(place.length, b"\0")[: place.length]
    path.write_bytes(bytes(written))
    TRACES.clear()
    with pytest.raises(RunError, match=r"'decoder\.final_layernorm\.weight' in .* cannot be read"):
        source.read(Piece("model.norm.weight", 0, 0, 32))
    assert not TRACES


def test_export_has_the_files_for_megatron(first: Path) -> None:
    root = first / "megatron"
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads((root / "release/metadata.json").read_text())["sharded_backend"] == "torch_dist"
    common = torch.load(root / "release/common.pt", weights_only=True)  # with the classes of Megatron-Core
    assert (common["iteration"], common["checkpoint_version"]) == (3, 3.0)
    arguments = vars(common["args"])
    expected = {"num_layers": 2, "num_query_groups": 2, "padded_vocab_size": VOCAB, "normalization": "RMSNorm"}
    expected |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "no_save_optim": True, "no_save_rng": True}
    assert arguments | expected == arguments and arguments["swiglu"] and arguments["tensor_model_parallel_size"] == 1
