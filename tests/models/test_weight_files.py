"""Files of a model folder: float8 weights are dequantised, and unexpected tensors are rejected."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megappo.commands.dry_run import dry_run
from megappo.config import ConfigError, load_config
from megappo.families import FAMILIES
from megappo.families.parameters import Piece, model_parameters, pieces, shard_shape
from megappo.families.weights import read_shard, scatter_shard
from megappo.models.model_files import read_architecture as read
from megappo.plan.bytes.rewards import reward_parameters
from megappo.plan.bytes.sizes import model_sizes
from megappo.ppo.assembly.models import ROLES, weight_sources
from megappo.reshard.sources import SafetensorsSource
from megappo.reshard.writer import save_tensors, write_policy
from tests.support.data import character_tokenizer
from tests.support.harness import start
from tests.support.models import VOCAB, quantise, write_model
from tests.support.places import BASE, QUICKSTART, TINY

SIZES = {"hidden_size": 40, "head_dim": 12, "intermediate_size": 56}
"""Sizes that are no multiples of 16, so that tensor parallel shards end within blocks."""


def change_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json. The value None removes a field."""
    content = json.loads((folder / "config.json").read_text()) | changes
    content = {name: value for name, value in content.items() if name not in changes or value is not None}
    (folder / "config.json").write_text(json.dumps(content))


def whole_tensors(folder: Path, dtype: torch.dtype, tp: int) -> dict[str, Tensor]:
    """Return all tensors of a folder, read shard by shard for each rank of a layout."""
    arch = read(folder)
    source = SafetensorsSource(folder, arch)
    source.check(with_output_layer=True)
    joined: dict[str, Tensor] = {}
    for entry in model_parameters(arch):
        whole = {n: torch.full(s, float("nan"), dtype=dtype) for n, s in entry.tensors.items()}
        for rank in range(tp):
            like = torch.empty(shard_shape(arch, entry, tp, VOCAB + 1), dtype=dtype)
            shard = read_shard(source, arch, entry, like, rank, tp, VOCAB + 1)
            scatter_shard(shard, pieces(arch, entry, rank, tp, VOCAB + 1), whole)
        joined |= whole
    return joined


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "blocks", "tp"), [("qwen3", (16, 16), 1), ("qwen2", (16, 9), 2), ("qwen3_moe", (7, 16), 2)]
)
def test_float8_weights_are_dequantised_exactly(
    tmp_path: Path, family: str, blocks: tuple[int, int], tp: int, dtype: torch.dtype
) -> None:
    plain = quantise(write_model(tmp_path / "m", family, 1, **SIZES), tmp_path / "float8", blocks)
    joined = whole_tensors(tmp_path / "float8", dtype, tp)
    assert joined.keys() == plain.keys()
    for name, tensor in plain.items():
        # A product of 4 and 24 significant bits is exact in float64.
        assert torch.equal(joined[name], tensor.float().to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_weights_match_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """The blocks must divide the matrices, because transformers derives the block size from the number of scales."""
    quantise(write_model(tmp_path / "m", "qwen3", 1), tmp_path / "float8", (16, 8))
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "float8", dtype=dtype).named_parameters())
    ours = whole_tensors(tmp_path / "float8", dtype, 2)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_support_other_dtypes(tmp_path: Path, kind: torch.dtype) -> None:
    quantise(write_model(tmp_path / "m", "llama", 1), tmp_path / "float8", (16, 16), scale_fmt="ue8m0")
    file = tmp_path / "float8" / "model-00002-of-00002.safetensors"
    scales = {name: tensor.to(kind) for name, tensor in load_file(file).items()}
    save_file(scales, file, metadata={"format": "pt"})
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(file.with_name("model-00001-of-00002.safetensors"))[name].double()
    spread = scales[f"{name}_scale_inv"].double().repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(whole_tensors(tmp_path / "float8", torch.float32, 1)[name].double(), weight * spread)


@pytest.mark.waits
def test_float8_folder_is_planned_and_exported_as_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "m", "qwen3", 1, max_position_embeddings=512)
    quantise(tmp_path / "m", tmp_path / "float8", (16, 16))
    arch, plain = read(tmp_path / "float8"), read(tmp_path / "m")
    assert (arch, model_sizes(arch)) == (plain, model_sizes(plain))
    write_policy(
        tmp_path / "out", arch, whole_tensors(tmp_path / "float8", torch.float32, 1).items(), character_tokenizer(),
        started_from=tmp_path / "float8", stop_token_ids=(1,),
    )  # fmt: skip
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    left = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "float8", dtype=torch.float32).state_dict()
    assert all(torch.equal(left[name], tensor) for name, tensor in theirs.items())
    settings = [f"model.path={tmp_path / 'float8'}", "model.init=pretrained", f"run.directory={tmp_path}/runs"]
    dry_run(load_config(QUICKSTART, [*settings, f"model.tokenizer={TINY}"]), str(QUICKSTART), [])
    count = len(whole_tensors(tmp_path / "m", torch.float32, 1))
    assert f"actor: all {count} tensors are in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("quantisation", "part_of_message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "quant_method compressed-tensors"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size [0, 128]"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            "activation_scheme static",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "fmt e5m2"),
        ({"weight_block_size": [128, 128]}, "quant_method None"),
    ],
)
def test_other_quantisations_are_rejected(tmp_path: Path, quantisation: dict[str, Any], part_of_message: str) -> None:
    folder = write_model(tmp_path / "m", "llama", 1)
    change_config(folder, quantization_config=quantisation)
    with pytest.raises(ConfigError) as caught:
        read(str(folder), key="reference.path")
    (problem,) = caught.value.problems
    remedy = "use the model's plain weights, or float8 weights"
    assert all(part in problem for part in ("reference.path", "quantization_config", part_of_message, remedy)), problem


def changed(folder: Path, file: str, **tensors: Tensor | None) -> None:
    """Add tensors to a file or remove tensors. In names, `__` means a dot."""
    stored = load_file(folder / file)
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, folder / file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] |= {key.replace("__", "."): file for key in tensors}
        index.write_text(json.dumps(content))


UP = "model__layers__0__mlp__up_proj__weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({UP: torch.zeros(48, 32, dtype=torch.int8)}, "is of type I8, which cannot be read"),
        ({UP: torch.zeros(48, 32, dtype=torch.float8_e5m2)}, "is of type F8_E5M2, which cannot be read"),
        ({UP: torch.zeros(48, 32)}, "has scales, but is of type F32"),
        ({"model__norm__weight": torch.zeros(32).to(torch.float8_e4m3fn)}, "is of type F8_E4M3 without scales"),
        ({f"{UP}_scale_inv": torch.ones(4, 2)}, "has shape (4, 2), but its config.json requires (3, 2)"),
        ({f"{UP}_scale_inv": torch.ones(3, 2, dtype=torch.int32)}, "are of type I32, must be of F32"),
        ({f"{UP}_scale": torch.ones(1)}, f"contains {UP.replace('__', '.')}_scale, which a llama"),
    ],
)
def test_unsupported_tensor_dtypes_are_rejected(tmp_path: Path, change: dict[str, Tensor], message: str) -> None:
    quantise(write_model(tmp_path / "m", "llama", 1), tmp_path / "float8", (16, 16))
    file = "model-00002-of-00002.safetensors" if "_scale" in next(iter(change)) else "model-00001-of-00002.safetensors"
    changed(tmp_path / "float8", file, **change)
    with pytest.raises(ValueError) as caught:
        SafetensorsSource(tmp_path / "float8", read(tmp_path / "float8")).check(with_output_layer=True)
    assert message in str(caught.value)


HEAD = "model__norm__weight"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 1e300])
@pytest.mark.parametrize("name", [UP, HEAD, "lm_head__weight"])
def test_non_finite_tensor_is_reported_with_its_file(tmp_path: Path, name: str, number: float) -> None:
    """One number of one tensor is not finite. The rank that reads the tensor reports the error."""
    folder = write_model(tmp_path / "m", "llama", 1)
    tensor = load_file(folder / "model.safetensors")[name.replace("__", ".")].double()
    tensor.view(-1)[-1] = number
    changed(folder, "model.safetensors", **{name: tensor})
    with pytest.raises(ValueError) as caught:
        whole_tensors(folder, torch.float32, 2)
    shown = number if number != 1e300 else "inf"
    message = f"tensor '{name.replace('__', '.')}' in {folder / 'model.safetensors'} contains {shown}, must be"
    assert message in str(caught.value)


@pytest.mark.waits
@pytest.mark.slow
def test_all_ranks_report_a_non_finite_tensor(tmp_path: Path) -> None:
    """Only the second of two tensor parallel ranks reads the number."""
    folder = write_model(tmp_path / "m", "llama", 1, vocab_size=len(AutoTokenizer.from_pretrained(TINY)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    tensor = load_file(folder / "model.safetensors")[UP.replace("__", ".")]
    tensor[-1, -1] = float("nan")
    changed(folder, "model.safetensors", **{UP: tensor})
    overrides = [f"model.path={folder}", "model.init=pretrained", f"run.directory={tmp_path / 'run'}"]
    done = start("megappo", "train", QUICKSTART, *overrides, processes=2)
    errors = [line for line in done.stderr.splitlines() if line.startswith("megappo: error")]
    assert done.returncode == 2 and len(errors) == 2, done.stderr
    sentence = f"tensor '{UP.replace('__', '.')}' in {folder / 'model.safetensors'} contains nan, must be finite"
    assert all(sentence in line and "(on rank 1, but not on every rank)" in line for line in errors)
    assert "Traceback" not in done.stderr, done.stderr


def test_non_finite_scales_and_experts_are_reported(tmp_path: Path) -> None:
    quantise(write_model(tmp_path / "m", "llama", 1), tmp_path / "float8", (16, 16))
    file = "model-00002-of-00002.safetensors"
    scales = load_file(tmp_path / "float8" / file)[f"{UP.replace('__', '.')}_scale_inv"]
    changed(tmp_path / "float8", file, **{f"{UP}_scale_inv": torch.full_like(scales, float("nan"))})
    with pytest.raises(ValueError, match=rf"tensor '{UP.replace('__', '.')}' in .* contains nan, must be finite"):
        whole_tensors(tmp_path / "float8", torch.float32, 1)
    folder = write_model(tmp_path / "experts", "gpt_oss", 1)
    name = "model__layers__1__mlp__experts__down_proj"
    packed = load_file(folder / "model.safetensors")[name.replace("__", ".")]
    packed[2, 1, 1] = float("inf")
    changed(folder, "model.safetensors", **{name: packed})
    with pytest.raises(ValueError, match=rf"tensor '{name.replace('__', '.')}' in .* contains inf, must be finite"):
        whole_tensors(folder, torch.float32, 1)


def test_float8_weights_require_quantization_config(tmp_path: Path) -> None:
    quantise(write_model(tmp_path / "m", "llama", 1), tmp_path / "float8", (16, 16))
    change_config(tmp_path / "float8", quantization_config=None)
    with pytest.raises(ValueError, match=r"_scale_inv, .* and others, which a llama .* quantization_config"):
        SafetensorsSource(tmp_path / "float8", read(tmp_path / "float8"))


@pytest.mark.parametrize(
    ("written", "changes", "message"),
    [
        ("qwen3", {"model_type": "llama"}, r"self_attn.k_norm.weight, .* which a llama of its config.json does not"),
        ("qwen2", {"model_type": "llama"}, r"self_attn.k_proj.bias, .* which a llama of its config.json does not"),
        ("llama", {"num_hidden_layers": 3}, r"contains model.layers.3.* the weights do not fit .*num_hidden_layers"),
    ],
)
def test_unexpected_tensors_are_rejected(tmp_path: Path, written: str, changes: dict[str, Any], message: str) -> None:
    folder = write_model(tmp_path / "m", written, 1)
    change_config(folder, layer_types=None, **changes)
    with pytest.raises(ValueError, match=message):
        SafetensorsSource(folder, read(folder))


def test_tensors_without_weights_are_ignored(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama", 1)
    others = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4), "score__weight": torch.ones(1, 32)}
    changed(folder, "model.safetensors", **others)
    assert SafetensorsSource(folder, read(folder)).check(with_output_layer=True) == 39


def test_mtp_layers_are_ignored(tmp_path: Path) -> None:
    """The MTP layers follow the layers of the model. The config.json has the number of MTP layers."""
    folder = write_model(tmp_path / "m", "glm4_moe", 1)
    whole = SafetensorsSource(folder, read(folder)).check(with_output_layer=True)
    changed(folder, "model.safetensors", model__layers__4__eh_proj__weight=torch.ones(2, 2))
    assert SafetensorsSource(folder, read(folder)).check(with_output_layer=True) == whole
    changed(folder, "model.safetensors", model__layers__5__eh_proj__weight=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"contains model\.layers\.5\.eh_proj\.weight, which a glm4_moe"):
        SafetensorsSource(folder, read(folder))


@pytest.mark.parametrize(
    ("family", "extra_names", "name"),
    [
        ("qwen3_5_text", ("mtp.fc", "model.visual.pos_embed"), "model.layers.0.linear_attn.A_log"),
        ("gemma4_text", ("model.vision_tower.std", "model.embed_vision.x"), "model.layers.0.input_layernorm.weight"),
    ],
)
def test_language_model_accepts_multimodal_names(
    tmp_path: Path, family: str, extra_names: tuple[str, ...], name: str
) -> None:
    """The names can be from transformers or from the published multimodal model with MTP layers. The test uses the
    configuration of the multimodal model if the family reads this configuration."""
    folder = write_model(tmp_path / "m", family, 1, tie_word_embeddings=False)
    plain = SafetensorsSource(folder, read(folder))
    whole = plain.check(with_output_layer=True)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    renamed |= {f"{stem}.weight": torch.ones(2, 2) for stem in extra_names}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    if within := FAMILIES[family].within:
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({"model_type": within, "text_config": text}))
    source = SafetensorsSource(folder, read(folder))
    assert source.check(with_output_layer=True) == whole
    piece = Piece(name, 0, 1, 3)
    assert torch.equal(source.read(piece), tensors[piece.name][1:3])


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_files_of_each_role_are_checked(tmp_path: Path, role: str) -> None:
    folders = {name: write_model(tmp_path / name, "llama", 1) for name in ("actor", "critic", "reference")}
    paths = [f"model.path={folders['actor']}", *(f"{r}.path={folders[r]}" for r in ("critic", "reference"))]
    config = load_config(BASE, [*paths, "model.init=pretrained"])
    assert set(weight_sources(config, ROLES)) == set(folders.values())
    changed(folders[role], "model.safetensors", model__extra=torch.ones(1))
    with pytest.raises(ValueError, match=f"{folders[role]} contains model.extra, which"):
        weight_sources(config, ROLES)


def test_tied_model_with_a_different_head_is_rejected(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama", 1, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    changed(folder, "model.safetensors", lm_head__weight=embedding.clone())
    source = SafetensorsSource(folder, read(folder))
    assert source.check(with_output_layer=True) == 38
    other = embedding.clone()
    other[VOCAB - 1, 3] += 1e-3
    changed(folder, "model.safetensors", lm_head__weight=other)
    message = r"an lm_head.weight that differs from its embedding, .* tie_word_embeddings: true"
    with pytest.raises(ValueError, match=message):
        SafetensorsSource(folder, read(folder)).check(with_output_layer=True)
    change_config(folder, tie_word_embeddings=False)
    assert torch.equal(whole_tensors(folder, torch.float32, 1)["lm_head.weight"], other)


def test_critic_ignores_the_tied_output_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only roles that use the output layer reject a different output layer. All roles share one check of a folder."""
    folder = write_model(tmp_path / "m", "llama", 1, tie_word_embeddings=True)
    changed(folder, "model.safetensors", lm_head__weight=torch.zeros(VOCAB, 32))
    assert SafetensorsSource(folder, read(folder)).check(with_output_layer=False) == 38
    config = load_config(BASE, [f"model.path={folder}", f"critic.path={folder}", "model.init=pretrained"])
    assert set(weight_sources(config, ("critic",))) == {folder}
    with pytest.raises(ValueError, match=r"an lm_head.weight that differs from its embedding"):
        weight_sources(config, ROLES)
    checks: list[bool] = []
    monkeypatch.setattr(SafetensorsSource, "check", lambda _, with_output_layer: checks.append(with_output_layer))
    weight_sources(config, ROLES)
    assert checks == [True]


def disk_bytes() -> int:
    """Return the number of bytes that this process has read from a disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def test_ranks_of_a_node_read_a_file_once(tmp_path: Path) -> None:
    """Each rank maps the file, so ranks share the page cache."""
    folder = write_model(tmp_path / "model", "qwen3", 1, hidden_size=512, intermediate_size=4096)
    path = folder / "model.safetensors"
    whole_tensors(folder, torch.float32, 2)  # excludes one-time reads of the process
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, size = disk_bytes(), path.stat().st_size
    for _ in range(2):  # two layouts of two ranks each
        whole_tensors(folder, torch.float32, 2)
    read_once = disk_bytes() - before
    if not read_once:
        pytest.skip(f"{tmp_path} is on no disk")
    assert 0.9 * size < read_once < 1.1 * size


def with_index(folder: Path, shards: dict[str, Tensor] | None, files: int = 2) -> None:
    """Add an index of several files next to the single file. The files contain the shards, or are missing if
    `shards` is None."""
    named: dict[str, str] = {}
    for number, name in enumerate(sorted(load_file(folder / "model.safetensors"))):
        named[name] = f"model-{number % files + 1:05d}-of-{files:05d}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    for file in sorted(set(named.values())) if shards is not None else ():
        assert shards is not None
        own = {name: shards[name] for name, at in named.items() if at == file}
        save_file(own, folder / file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("shards", ["older", "gone", "cut short"])
def test_single_file_takes_precedence_over_an_index(tmp_path: Path, family: str, shards: str) -> None:
    """The index can be from an older save. Transformers follows the same rule."""
    folder = write_model(tmp_path / "m", family, 1)
    older = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    truth = whole_tensors(folder, torch.float32, 2)
    with_index(folder, None if shards == "gone" else older)
    if shards == "cut short":
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"xx")
    loaded = whole_tensors(folder, torch.float32, 2)
    assert loaded.keys() == truth.keys() and all(torch.equal(loaded[name], truth[name]) for name in truth)
    theirs = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert all(torch.equal(loaded[name], theirs[name].data) for name in loaded.keys() & theirs.keys())


def test_index_without_a_single_file_is_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama", 1)
    truth = load_file(folder / "model.safetensors")
    with_index(folder, truth)
    (folder / "model.safetensors").unlink()
    loaded = whole_tensors(folder, torch.float32, 1)
    assert all(torch.equal(loaded[name], truth[name].float()) for name in loaded)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not an index of safetensors, .*; fetch or save it again"):
        whole_tensors(folder, torch.float32, 1)


def test_other_files_are_not_counted(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama", 1)
    truth = load_file(folder / "model.safetensors")
    with_index(folder, truth)
    for _ in ("with the single file", "without the single file"):
        reward_parameters.cache_clear()
        assert reward_parameters(str(folder)) == sum(tensor.numel() for tensor in truth.values())
        (folder / "model.safetensors").unlink(missing_ok=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="requires Linux")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_full_disk_error_includes_the_path(tmp_path: Path, name: str) -> None:
    """One file of the export cannot be written."""
    folder, out = write_model(tmp_path / "m", "llama", 1), tmp_path / "out"
    out.mkdir()
    (out / name).symlink_to("/dev/full")
    tensors, arch = whole_tensors(folder, torch.float32, 1), read(folder)
    with pytest.raises(OSError) as caught:
        write_policy(out, arch, tensors.items(), character_tokenizer(), started_from=folder, stop_token_ids=(1,))
    assert (caught.value.errno, str(caught.value.filename).startswith(str(out))) == (errno.ENOSPC, True)


def test_failed_tensor_write_names_the_file(tmp_path: Path) -> None:
    """The error of safetensors does not name the file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError) as caught:
            save_tensors({"a": torch.zeros(1000)}, tmp_path / "a.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "a.safetensors"))
