"""Experts that are stored in one tensor per layer, plain or in MXFP4, match the weights that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megappo.commands.dry_run import dry_run
from megappo.config import load_config
from megappo.families.packed import packed_parts, packed_tensors
from megappo.families.parameters import Piece, tensor_shapes
from megappo.models.model_files import read_architecture as read
from megappo.plan.bytes.sizes import model_sizes
from megappo.reshard.mxfp4 import dequantised
from megappo.reshard.sources import SafetensorsSource
from megappo.reshard.writer import write_policy
from tests.support.data import character_tokenizer
from tests.support.models import expert_by_expert, write_model
from tests.support.places import QUICKSTART, TINY

MATRICES = ("gate_up_proj", "down_proj")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
"""Matrix sizes that are multiples of a block of 32 numbers."""
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def all_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder by the names of the parameter map."""
    arch = read(folder)
    source = SafetensorsSource(folder, arch)
    source.check(with_output_layer=True)
    return {name: source.read(Piece(name, 0, 0, shape[0])) for name, shape in tensor_shapes(arch).items()}


def quantised(folder: Path, out: Path) -> dict[str, Tensor]:
    """Write a folder in the format of OpenAI with random numbers, and return its tensors."""
    out.mkdir()
    content = json.loads((folder / "config.json").read_text()) | {"quantization_config": QUANTIZATION}
    (out / "config.json").write_text(json.dumps(content))
    g = torch.Generator().manual_seed(4)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(MATRICES):
            tensors[name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=g, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, generator=g, dtype=torch.uint8)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models `plain` and `mxfp4`."""
    root = tmp_path_factory.mktemp("models")
    quantised(write_model(root / "plain", "gpt_oss", 1, max_position_embeddings=512, **SIZES), root / "mxfp4")
    return root


def test_dequantised_bytes_match_transformers() -> None:
    """The test covers each byte with each scale, except the NaN scale. Negative zeros also match."""
    scales = torch.arange(255, dtype=torch.uint8)
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    pairs = blocks.repeat(1, 255).view(16, 255, 16)
    mine = dequantised(pairs, scales.repeat(16, 1))
    theirs = convert_moe_packed_tensors(pairs[None], scales.repeat(16, 1)[None])[0].T
    assert mine.dtype == torch.float32 and mine.shape == theirs.shape == (16, 255 * 32)
    narrow = mine.bfloat16()
    assert torch.equal(narrow.view(torch.int16), theirs.contiguous().view(torch.int16))
    assert torch.equal(narrow.float(), mine)


def test_mxfp4_folder_matches_transformers(folder: Path) -> None:
    ours = all_tensors(folder / "mxfp4")
    config = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "mxfp4", dtype=torch.bfloat16, quantization_config=config)
    theirs = dict(expert_by_expert(dict(model.named_parameters())))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].bfloat16(), tensor), name
        assert torch.equal(ours[name].bfloat16().float(), ours[name].float()), (
            name
        )  # bfloat16 represents the value exactly


@pytest.mark.waits
def test_dry_run_checks_mxfp4_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        f"model.path={folder / 'mxfp4'}", "model.init=pretrained", f"run.directory={tmp_path}",
        f"model.tokenizer={TINY}",
        "actor.layout={tensor_parallel: 2, expert_parallel: 2, sequence_parallel: true}",
        "critic.layout={pipeline_parallel: 2}",
    ]  # fmt: skip
    dry_run(load_config(QUICKSTART, settings), str(QUICKSTART), [])
    count = len(load_file(folder / "plain" / "model.safetensors"))
    message = (
        f"actor: all {count} tensors are in {folder / 'mxfp4'}, in the shapes of its config.json and MXFP4 weights"
    )
    assert message in " ".join(capsys.readouterr().out.split())


def test_mxfp4_weights_are_exported_as_plain_weights(folder: Path, tmp_path: Path) -> None:
    arch, plain = read(folder / "mxfp4"), read(folder / "plain")
    assert (arch, model_sizes(arch)) == (plain, model_sizes(plain)) and arch.stored_mxfp4 and not plain.stored_mxfp4
    tensors = {name: tensor.bfloat16() for name, tensor in all_tensors(folder / "mxfp4").items()}
    write_policy(
        tmp_path / "out", arch, tensors.items(), character_tokenizer(),
        started_from=folder / "mxfp4", stop_token_ids=(1,),
    )  # fmt: skip
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    again = dict(expert_by_expert(dict(model.named_parameters())))
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_plain_files_are_read_and_written_unchanged(folder: Path) -> None:
    stored, arch = load_file(folder / "plain" / "model.safetensors"), read(folder / "plain")
    mine = all_tensors(folder / "plain")
    assert mine.keys() == dict(expert_by_expert(stored)).keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in expert_by_expert(stored))
    again = dict(packed_tensors(arch, mine.items()))
    assert again.keys() == stored.keys() and all(torch.equal(again[name], tensor) for name, tensor in stored.items())
    # A parameter map can request a part of the tensor of an expert.
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    source = SafetensorsSource(folder / "plain", arch)
    assert torch.equal(source.read(Piece(name, 1, 7, 30)), mine[name][:, 7:30])
    assert torch.equal(source.read(Piece(name, 0, 3, 4)), mine[name][3:4])


@pytest.mark.parametrize("kind", ["missing", "shape"])
def test_export_with_an_incomplete_expert_fails(folder: Path, tmp_path: Path, kind: str) -> None:
    arch, tensors = read(folder / "plain"), all_tensors(folder / "plain")
    name = "model.layers.1.mlp.experts.5.up_proj.bias"
    if kind == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"not form a complete model: .*experts\.gate_up_proj_bias"):
        write_policy(
            tmp_path / "out", arch, tensors.items(), character_tokenizer(),
            started_from=folder / "plain", stop_token_ids=(1,),
        )  # fmt: skip
    assert packed_parts(arch)[name].name == "model.layers.1.mlp.experts.gate_up_proj_bias"


GATES = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{GATES}_scales": None}, f"has no tensor '{GATES}_scales'; fetch the model again"),
        ({f"{GATES}_blocks": None}, f"has no tensor '{GATES}_blocks'; fetch the model again"),
        ({f"{GATES}_blocks": None, f"{GATES}_scales": None}, f"has no tensor '{GATES}'; the weights do not fit"),
        ({f"{GATES}_scales": torch.zeros(8, 192, 3, dtype=torch.uint8)}, "has shape (8, 192, 3), but its config.json"),
        ({f"{GATES}_scales": torch.zeros(8, 192, 2)}, "is of type F32, must be U8 for MXFP4"),
        ({GATES: torch.zeros(8, 64, 192)}, f"'{GATES}' in "),
        (
            {f"{GATES}_zeros": torch.zeros(1)},
            f"contains {GATES}_zeros, which a gpt_oss of its config.json does not have",
        ),
    ],
)
def test_incomplete_files_are_rejected(
    folder: Path, tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    tensors = load_file(folder / "mxfp4" / "model.safetensors") | {n: t for n, t in changes.items() if t is not None}
    for name in (n for n, t in changes.items() if t is None):
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError) as caught:
        SafetensorsSource(tmp_path, read(folder / "mxfp4")).check(with_output_layer=True)
    assert message in str(caught.value)


def test_sizes_without_whole_blocks_are_rejected(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "gpt_oss", 1, num_hidden_layers=1)
    tensors: dict[str, Any] = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    experts, inputs, outputs = tensors.pop(name).shape
    assert inputs == 48
    tensors[f"{name}_blocks"] = torch.zeros(experts, outputs, 2, 16, dtype=torch.uint8)
    tensors[f"{name}_scales"] = torch.zeros(experts, outputs, 2, dtype=torch.uint8)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"down_proj_blocks, .* which a gpt_oss .* quantization_config"):
        SafetensorsSource(model, read(model))
    content = json.loads((model / "config.json").read_text()) | {"quantization_config": QUANTIZATION}
    (model / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"matrices with a multiple of 32 inputs instead of 48"):
        SafetensorsSource(model, read(model)).check(with_output_layer=True)
