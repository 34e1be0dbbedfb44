"""Exports from the checkpoint of another run, and new runs that start from its models if the architecture is equal."""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from megappo.checkpoint.exports.export import export_run
from megappo.checkpoint.files import Marker, read_marker, write_marker
from megappo.checkpoint.identity import architecture_fields
from megappo.checkpoint.source import CheckpointSource
from megappo.checkpoint.torch_dist.source import TorchDistSource
from megappo.cli import main
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import model_parameters, pieces, shard_shape
from megappo.families.weights import read_shard
from megappo.models.model_files import read_architecture
from megappo.ppo.assembly.origins import open_origin
from megappo.reshard.sources import SafetensorsSource
from megappo.runtime.process import Runtime
from megappo.runtime.ranks import objects
from tests.support.checkpoints import one_step_run
from tests.support.models import VOCAB
from tests.support.places import TINY

TOKENIZER = TINY
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a `model`, and a `run` with a checkpoint of step 1 with the weights of the model."""
    return one_step_run(tmp_path_factory.mktemp("first"))


@pytest.fixture
def world(first: Path, tmp_path: Path) -> Path:
    """Return a copy that tests can change. The settings of the run still name the `model` of the original."""
    return shutil.copytree(first, tmp_path / "world")


def changed_arch(folder: Path, **changes: Any) -> ArchitectureConfig:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return read_architecture(folder)


def test_run_starts_from_weights_of_an_equal_model(world: Path) -> None:
    run = str(world / "run")
    origin = open_origin(run, "actor", changed_arch(world / "model", max_position_embeddings=256))
    source = origin.source
    assert "the actor begins with that of " in origin.summary
    assert isinstance(source, CheckpointSource)
    expected = load_file(world / "model/model.safetensors")
    loaded = dict(source.tensors())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match=r"it differs in ropes from the actor's config\.json"):
        open_origin(run, "actor", changed_arch(world / "model", rope_parameters=LLAMA3))
    with pytest.raises(ValueError, match=r"it differs in norm_eps, ropes from"):
        open_origin(run, "actor", changed_arch(world / "model", rms_norm_eps=1e-2))


def test_checkpoint_is_exported_for_megatron(world: Path, tmp_path: Path) -> None:
    """A run that starts from the export has the weights of the checkpoint on any layout."""
    out = tmp_path / "out"
    assert main(["export", str(world / "run"), str(out), "--format", "torch_dist"]) == 0
    arch = read_architecture(world / "model")
    exported, original = open_origin(str(out), "actor", arch).source, SafetensorsSource(world / "model", arch)
    assert isinstance(exported, TorchDistSource)
    for parameter in model_parameters(arch):
        like = torch.empty(shard_shape(arch, parameter, 2, VOCAB + 1))
        for rank in range(2):
            shard = (arch, parameter, like, rank, 2, VOCAB + 1)
            assert torch.equal(read_shard(exported, *shard), read_shard(original, *shard)), parameter.megatron


def test_larger_vocabulary_is_not_padding(world: Path) -> None:
    with pytest.raises(ValueError, match=r"it differs in vocab_size from the actor's config\.json"):
        open_origin(str(world / "run"), "actor", changed_arch(world / "model", vocab_size=VOCAB - 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tied_embeddings": True}, "config.json: lm_head.weight is in only one of them"),
        (
            {"layers": 1},
            "config.json: model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
            "model.layers.1.mlp.gate_proj.weight and 4 more are in only one of them",
        ),
    ],
)
def test_differing_tensors_are_named(world: Path, changes: dict[str, Any], message: str) -> None:
    arch = dataclasses.replace(read_architecture(world / "model"), **changes)
    with pytest.raises(ValueError, match="architecture of the actor in .* differs from config") as refused:
        CheckpointSource(world / "run/checkpoints/step-000001", "actor", arch)
    assert message in str(refused.value)


@pytest.mark.parametrize("more", [-8, 8])
def test_tensors_with_different_shapes_are_refused(world: Path, more: int) -> None:
    """Smaller and larger shapes are refused."""
    arch = read_architecture(world / "model")
    other = dataclasses.replace(arch, ffn_hidden_size=arch.ffn_hidden_size + more)
    with pytest.raises(ValueError, match=r"mlp\..* has shape .*; the checkpoint is of another model"):
        dict(CheckpointSource(world / "run/checkpoints/step-000001", "actor", other).tensors())


def rewrite(run: Path, **changes: Any) -> None:
    """Change the content of a marker. The value None removes an entry."""
    folder = run / "checkpoints/step-000001"
    marker = read_marker(folder)
    content = {name: value for name, value in (marker.content | changes).items() if value is not None}
    write_marker(folder, Marker(1, marker.files, content))


def of_its_own(world: Path) -> None:
    """Let the settings of the copied run name the copied model."""
    settings = read_marker(world / "run/checkpoints/step-000001").content["settings"]
    rewrite(world / "run", settings=settings | {"model": settings["model"] | {"path": str(world / "model")}})


def test_older_checkpoints_have_the_config_of_their_model(world: Path) -> None:
    of_its_own(world)
    rewrite(world / "run", architectures=None)
    run, arch = str(world / "run"), read_architecture(world / "model")
    open_origin(run, "actor", arch)
    with pytest.raises(ValueError, match="it differs in norm_eps"):
        open_origin(run, "actor", dataclasses.replace(arch, norm_eps=1e-2))
    changed_arch(world / "model", rms_norm_eps=1e-2)
    with pytest.raises(ValueError, match=r"\(sha256 \w{12}, at the start \w{12}\); restore the folder"):
        open_origin(run, "actor", arch)


def test_extensions_have_an_older_name(world: Path) -> None:
    """Checkpoints of versions before 1.0 may contain extensions as `beyond`."""
    run, arch = str(world / "run"), read_architecture(world / "model")
    fields: dict[str, Any] = architecture_fields(arch)
    extensions = fields.pop("extensions")
    rewrite(world / "run", architectures={"actor": fields | {"beyond": extensions}})
    open_origin(run, "actor", arch)
    rewrite(world / "run", architectures={"actor": fields | {"beyond": extensions | {"sinks": True}}})
    with pytest.raises(ValueError, match="it differs in extensions"):
        open_origin(run, "actor", arch)


def test_records_of_earlier_versions_are_compared(world: Path) -> None:
    """The records contain `rope_parameters`, and no settings of layers. Missing fields have their defaults."""
    run, arch = str(world / "run"), read_architecture(world / "model")
    names = {field.name for field in dataclasses.fields(arch) if field.compare and field.name != "extensions"}
    record: dict[str, Any] = {name: value for name, value in architecture_fields(arch).items() if name in names}
    parameters = arch.hf_config.rope_parameters
    rewrite(world / "run", architectures={"actor": {**record, "rope_parameters": parameters}})
    open_origin(run, "actor", arch)
    rewrite(world / "run", architectures={"actor": {**record, "rope_parameters": {**parameters, "rope_theta": 77.0}}})
    with pytest.raises(ValueError, match="it differs in ropes from"):
        open_origin(run, "actor", arch)
    rewrite(world / "run", architectures={"actor": {**record, "norm_eps": 0.5, "rope_parameters": parameters}})
    with pytest.raises(ValueError, match="it differs in norm_eps from"):
        open_origin(run, "actor", arch)


def test_export_with_a_changed_config_is_refused(world: Path, tmp_path: Path) -> None:
    of_its_own(world)
    changed_arch(world / "model", rms_norm_eps=1e-2)
    with pytest.raises(ValueError, match=r"the config\.json in .* differs from the start of the run"):
        export_run(str(world / "run"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("exists", [False, True])
def test_failed_export_leaves_no_files(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    run, out = str(world / "run"), tmp_path / "out"
    if exists:
        out.mkdir()
    with monkeypatch.context() as patched:

        def fail(*_: Any, **__: Any) -> None:
            assert list(out.glob("*.safetensors"))
            raise OSError("no space left")

        patched.setattr("transformers.PretrainedConfig.save_pretrained", fail)
        with pytest.raises(OSError, match="no space left"):
            export_run(run, str(out))
    assert out.exists() == exists
    assert not list(out.glob("*"))
    export_run(run, str(out))
    assert load_file(out / "model.safetensors").keys() == load_file(world / "model/model.safetensors").keys()


def test_missing_files_on_one_rank_stop_all_ranks(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has all files also raises the error. Otherwise that rank would wait for a rank that has ended."""
    others: list[str] = []

    monkeypatch.setattr(objects, "all_gather_objects", lambda mine: [mine, others.pop(0)])
    arch, two = read_architecture(world / "model"), Runtime(0, 2, 0, torch.device("cpu"))
    others += ["", ""]
    open_origin(str(world / "model"), "actor", arch, two)
    for problems in (["it is not there"], ["", "it is not there"]):
        others[:] = problems
        with pytest.raises(ValueError, match=r"it is not there \(on rank 1, but not on every rank\)"):
            open_origin(str(world / "model"), "actor", arch, two)
    others[:] = [""]
    with pytest.raises(ValueError, match=r"does not exist .*\(on rank 0, but not on every rank\)"):
        open_origin(str(tmp_path / "nothing"), "actor", arch, two)


@pytest.mark.parametrize("text", ["{run}@", "@120"])
def test_incomplete_run_and_step_is_refused(world: Path, text: str) -> None:
    arch = read_architecture(world / "model")
    with pytest.raises(ValueError, match="the @ separates a run from its step; give RUN@STEP"):
        open_origin(text.format(run=world / "run"), "actor", arch)


def test_stored_tensor_is_read_once_and_freed(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query, key and value of many heads are slices of one tensor. The tensor is freed with its source."""
    read: list[str] = []
    load = dcp.load

    def counted(state: dict[str, Any], **how: Any) -> None:
        read.extend(state)
        load(state, **how)

    monkeypatch.setattr(dcp, "load", counted)
    arch = read_architecture(world / "model")
    source = CheckpointSource(world / "run/checkpoints/step-000001", "actor", arch)
    parameters = [p for p in model_parameters(arch) if p.kind == "qkv"]
    slices = [piece for p in parameters for piece in pieces(arch, p, 0, 1, VOCAB)]
    whole = [source.read(piece).untyped_storage().data_ptr() for piece in slices if piece.name == slices[0].name]
    assert len(slices) == 12 and len(set(whole)) == 1, "each slice has copied the whole tensor"
    assert read == ["actor.weight.model.layers.0.self_attn.qkv_proj.weight"]
    gone = weakref.ref(source)
    gc.disable()
    try:
        del source
        assert gone() is None
    finally:
        gc.enable()
