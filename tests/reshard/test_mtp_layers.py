"""Multi-token prediction (MTP) layers of a folder are exported again, and engines can draft tokens with the export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpModel

from megappo.checkpoint.identity import tensor_digest, whole_digest
from megappo.commands.dry_run import dry_run
from megappo.config.load import load_config
from megappo.families.packed import stored_shapes
from megappo.families.parameters import wide_tensors
from megappo.models.model_files import read_architecture
from megappo.plan.bytes.sizes import model_sizes
from megappo.reshard.mtp import MTPLayers, mtp_layers_in
from megappo.reshard.sources import SafetensorsSource
from megappo.reshard.writer import write_critic, write_policy
from tests.support.models import add_mtp_layers, quantise, write_model
from tests.support.places import QUICKSTART, ROOT, TINY

COUNTS = {
    "glm4_moe": "num_nextn_predict_layers",
    "deepseek_v3": "num_nextn_predict_layers",
    "qwen3_next": "mtp_num_hidden_layers",
    "qwen3_5_text": "mtp_num_hidden_layers",
    "qwen3_5_moe_text": "mtp_num_hidden_layers",
}
"""Field of config.json with the number of MTP layers."""


def written(folder: Path, family: str) -> tuple[Path, dict[str, Tensor]]:
    """Write a model of two layers with an additional MTP layer, and return the folder and the MTP tensors."""
    write_model(folder, family, 1, num_hidden_layers=2, **{COUNTS[family]: 1})
    return folder, add_mtp_layers(folder)


def export(out: Path, mtp: MTPLayers, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], int]:
    """Write a model of zeros with these layers. Return the tensors of the file and the number of layers in
    config.json."""
    arch = mtp.arch
    wide = wide_tensors(arch)
    whole = [(n, torch.zeros(shape, dtype=None if n in wide else dtype)) for n, shape in stored_shapes(arch).items()]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tensors = [*whole, *mtp.exported(dtype)]
    tensors.sort(key=lambda entry: entry[1].dtype == torch.float32)  # order of the stream in a run
    write_policy(out, arch, tensors, tokenizer, started_from=out, stop_token_ids=(1,))
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())[COUNTS[arch.family]]


@pytest.mark.parametrize("family", COUNTS)
def test_export_includes_mtp_layers(tmp_path: Path, family: str) -> None:
    """MTP layers are exported bit for bit. A model without MTP layers exports none. Other tensors do not change."""
    folder, original = written(tmp_path / "m", family)
    mtp = mtp_layers_in(folder, read_architecture(folder))
    assert {*mtp.names} == original.keys()
    left, count = export(tmp_path / "out", mtp)
    assert count == 1 and all(torch.equal(left[name], tensor) for name, tensor in original.items())
    assert left.keys() == stored_shapes(mtp.arch).keys() | original.keys()
    again = mtp_layers_in(
        tmp_path / "out", read_architecture(tmp_path / "out")
    )  # another run can start from the export
    assert all(torch.equal(original[name], tensor) for name, tensor in again.tensors())
    without, count = export(tmp_path / "none", MTPLayers(mtp.arch))
    assert count == 0 and without.keys() == left.keys() - original.keys()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    shapes = stored_shapes(mtp.arch, output_layer=False) | {"score.weight": (1, 32), "score.bias": (1,)}
    write_critic(tmp_path / "critic", mtp.arch, ((n, torch.zeros(s)) for n, s in shapes.items()), tokenizer)
    assert json.loads((tmp_path / "critic" / "config.json").read_text())[COUNTS[family]] == 0


def test_mtp_layers_have_the_dtype_of_the_run(tmp_path: Path) -> None:
    """Correction biases are float32 in each layer. The config.json has the dtype of all other tensors."""
    folder, original = written(tmp_path / "m", "deepseek_v3")
    left, _ = export(tmp_path / "out", mtp_layers_in(folder, read_architecture(folder)), torch.bfloat16)
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert torch.equal(left[bias], original[bias])
    assert all(torch.equal(left[name], original[name].bfloat16()) for name in original if name != bias)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_export_can_draft_tokens(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers drafts the tokens and rejects incomplete layers. The test sets the index of the MTP layer."""
    folder, original = written(tmp_path / "m", family)
    export(tmp_path / "out", mtp_layers_in(folder, read_architecture(folder)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    drafts = MtpModel.from_pretrained(model)
    (layer,) = drafts.layers
    for name, parameter in {"enorm": layer.enorm, "hnorm": layer.hnorm, "eh_proj": layer.eh_proj}.items():
        assert torch.equal(parameter.weight, original[f"model.layers.2.{name}.weight"])
    assert torch.equal(layer.mtp_block.self_attn.o_proj.weight, original["model.layers.2.self_attn.o_proj.weight"])
    tokens = torch.arange(2, 8)[None]
    answers = [model.generate(tokens, max_new_tokens=6, do_sample=False, use_mtp=use) for use in (True, False)]
    assert torch.equal(*answers)


def test_float8_mtp_layers_are_dequantised(tmp_path: Path) -> None:
    folder, original = written(tmp_path / "m", "deepseek_v3")
    plain = quantise(folder, tmp_path / "float8", (16, 16))
    mtp = mtp_layers_in(tmp_path / "float8", read_architecture(tmp_path / "float8"))
    left, count = export(tmp_path / "out", mtp)
    assert count == 1 and left.keys() == stored_shapes(mtp.arch).keys() | original.keys()
    assert all(torch.equal(left[name], plain[name].float()) for name in original)
    assert not torch.equal(left["model.layers.2.eh_proj.weight"], original["model.layers.2.eh_proj.weight"])


@pytest.mark.waits
def test_dry_run_counts_mtp_layers_separately(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "m", "glm4_moe", 1, num_hidden_layers=2, max_position_embeddings=512)
    mtp_tensors, quickstart = add_mtp_layers(folder), QUICKSTART
    own = len(load_file(folder / "model.safetensors")) - len(mtp_tensors)
    tokenizer = f"model.tokenizer={ROOT / 'configs/models/tiny_arithmetic'}"
    settings = [
        f"model.path={folder}", "model.init=pretrained", tokenizer, f"run.directory={tmp_path}/runs", "actor.layout={}",
    ]  # fmt: skip
    dry_run(load_config(quickstart, settings), str(quickstart), [])
    output = " ".join(capsys.readouterr().out.split())
    assert f"actor: all {own} tensors are in" in output
    assert f"{len(mtp_tensors)} of layers for multi-token prediction are kept for exports" in output


def test_ranks_share_the_mtp_checksum(tmp_path: Path) -> None:
    folder, original = written(tmp_path / "m", "glm4_moe")
    mtp = mtp_layers_in(folder, read_architecture(folder))
    shares = [dict(mtp.tensors(share=(rank, 3))) for rank in range(3)]
    assert sum(map(len, shares)) == len(original) and all(len(share) <= len(original) // 3 + 1 for share in shares)
    digests = {name: tensor_digest(tensor) for share in shares for name, tensor in share.items()}
    assert whole_digest(digests) == whole_digest({name: tensor_digest(tensor) for name, tensor in original.items()})


def test_mtp_layers_are_readable_after_folder_removal(tmp_path: Path) -> None:
    """The folder can be removed during a run."""
    folder, original = written(tmp_path / "m", "glm4_moe")
    arch = read_architecture(folder)
    mtp = MTPLayers(arch, SafetensorsSource(folder, arch).of_mtp_layers())
    (folder / "model.safetensors").unlink()
    assert {*mtp.names} == original.keys()
    assert all(torch.equal(original[name], tensor) for name, tensor in mtp.tensors())


def test_unsupported_dtype_is_reported(tmp_path: Path) -> None:
    """The headers of all files are checked before the model is built."""
    folder, _ = written(tmp_path / "m", "glm4_moe")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(32, 64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = r"'model\.layers\.2\.eh_proj\.weight' .* is of type I8 .*, which cannot be read"
    with pytest.raises(ValueError, match=message):
        SafetensorsSource(folder, read_architecture(folder)).check(with_output_layer=True)


def test_mtp_layers_are_no_part_of_the_model(tmp_path: Path) -> None:
    """The plan and the configuration of the servers exclude MTP layers."""
    folder = write_model(tmp_path / "m", "deepseek_v3", 1, num_hidden_layers=2)
    before = model_sizes(read_architecture(folder))
    add_mtp_layers(folder)
    arch = read_architecture(folder)
    assert model_sizes(arch) == before
    assert arch.declaration.extra_config(arch.hf_config)["num_mtp_layers"] == 0
