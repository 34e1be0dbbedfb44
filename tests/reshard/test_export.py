"""Exported folders load with transformers, and scalar heads of value models from other libraries."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer, GenerationConfig

from megappo.families import FAMILIES, architecture
from megappo.families.rope import earlier_rope_fields
from megappo.families.weights import ValueHeadWeights
from megappo.models.model_files import read_architecture
from megappo.reshard.sources import SafetensorsSource
from megappo.reshard.value_heads import EXPORTED, ValueHeadNames, find_value_head
from megappo.reshard.writer import write_critic, write_policy
from tests.support.models import write_model, write_value_model
from tests.support.places import TINY


def write(out: Path, folder: Path, *, without: str = "") -> None:
    """Export the model of a folder."""
    tensors = load_file(folder / "model.safetensors")
    write_policy(
        out, read_architecture(folder), ((name, tensor) for name, tensor in tensors.items() if name != without),
        AutoTokenizer.from_pretrained(TINY), started_from=folder, stop_token_ids=(1, 3),
    )  # fmt: skip


def test_exports_have_generation_settings(tmp_path: Path) -> None:
    """The export has the settings of the model and all stop tokens of the run."""
    folder = write_model(tmp_path / "model", "llama", 3)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.95, "eos_token_id": 1}))
    write(tmp_path / "out", folder)
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (settings.temperature, settings.top_p, settings.eos_token_id) == (0.6, 0.95, [1, 3])
    (folder / "generation_config.json").unlink()
    write(tmp_path / "other", folder)
    settings = GenerationConfig.from_pretrained(tmp_path / "other")
    assert (settings.pad_token_id, settings.eos_token_id) == (0, [1, 3])


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}


WITHOUT_SCALING = (("gemma3_text", "yarn"), ("gemma4_text", "linear"), ("gemma4_text", "yarn"))


@pytest.mark.parametrize(("family", "kind"), sorted({*itertools.product(FAMILIES, ROPES)} - {*WITHOUT_SCALING}))
def test_export_works_with_transformers_4_and_5(tmp_path: Path, family: str, kind: str) -> None:
    """Transformers 4 reads the fields at the top level of config.json only. Its defaults differ from these values."""
    folder = write_model(tmp_path / "model", family, 3)
    config: Any = AutoConfig.from_pretrained(folder)
    rope = config.rope_parameters if "rope_type" in config.rope_parameters else config.rope_parameters["full_attention"]
    for name in rope.keys() - {"partial_rotary_factor"} if kind != "default" else ():
        del rope[name]
    rope |= {} if kind == "default" else {"rope_type": kind, "rope_theta": 777.0, **ROPES[kind]}
    config.save_pretrained(folder)
    write(tmp_path / "out", folder)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["torch_dtype"] == written["dtype"] == "float32"
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == config.rope_parameters
    if family == "gemma4_text":  # transformers 4 has no format for these ropes
        assert "rope_theta" not in written
        return
    assert written["rope_theta"] == rope["rope_theta"]
    assert written.get("partial_rotary_factor") == rope.get("partial_rotary_factor")
    names = rope.keys() - {"rope_theta", "partial_rotary_factor"}
    expected = {name: rope[name] for name in names} if rope["rope_type"] != "default" else None
    assert written["rope_scaling"] == expected
    if family == "gemma3_text":
        assert written["rope_local_base_freq"] == config.rope_parameters["sliding_attention"]["rope_theta"]


def test_model_without_ropes_has_no_rope_fields() -> None:
    """A family of the user may use other position embeddings."""
    assert earlier_rope_fields({"model_type": "mine"}) == {}
    assert earlier_rope_fields({"model_type": "mine", "rope_parameters": None}) == {}


def test_transformers_4_and_5_read_the_same_tokenizer(tmp_path: Path) -> None:
    """Transformers 4 supports neither the class TokenizersBackend nor a list of `extra_special_tokens`."""
    folder = write_model(tmp_path / "model", "llama", 3)
    tokenizer = AutoTokenizer.from_pretrained(TINY, extra_special_tokens=["<one>", "<two>"])
    arch, tensors = read_architecture(folder), load_file(folder / "model.safetensors")
    write_policy(tmp_path / "out", arch, tensors.items(), tokenizer, started_from=folder, stop_token_ids=(1,))
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in written
    assert written["additional_special_tokens"] == ["<one>", "<two>"]
    read = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read.get_vocab() == tokenizer.get_vocab() and read.all_special_ids == tokenizer.all_special_ids
    assert read.encode("<two>1+2=") == tokenizer.encode("<two>1+2=")


def test_files_follow_the_umask(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama", 3)
    before = os.umask(0o027)
    try:
        write(tmp_path / "out", folder)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= modes.keys()
    assert set(modes.values()) == {0o640}, modes


def test_incomplete_export_leaves_no_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama", 3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors.index.json").write_text("{}")  # from an earlier export in several files
    with pytest.raises(ValueError, match=r"not form a complete model: model\.norm\.weight; the export was not"):
        write(tmp_path / "out", folder, without="model.norm.weight")
    assert not list((tmp_path / "out").iterdir())
    write(tmp_path / "out", folder)
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


UNCLASSIFIED = ("gemma3_text", "gemma4_text", "glm4_moe", "qwen3_5_text", "qwen3_5_moe_text")
"""Families without a token classifier in transformers."""


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_critic_is_a_token_classifier(tmp_path: Path, family: str) -> None:
    folder = write_value_model(tmp_path / "model", family, 3, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    write_critic(tmp_path / "out", read_architecture(folder), tensors.items(), tokenizer)
    if family in UNCLASSIFIED:
        source = SafetensorsSource(tmp_path / "out", read_architecture(tmp_path / "out"))
        head = source.value_head()
        assert head is not None and source.check(with_output_layer=False) == len(tensors) - 2
        assert torch.equal(head.weight, tensors["score.weight"]) and torch.equal(head.bias, tensors["score.bias"])
        return
    model, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert model.dropout.p == 0
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        values = model.eval()(tokens).logits[0, :, 0]
        hidden = model.model(tokens).last_hidden_state[0]
    expected = hidden @ tensors["score.weight"][0] + tensors["score.bias"]
    torch.testing.assert_close(values, expected)


def test_normalised_head_is_exported_with_scaled_weights(tmp_path: Path) -> None:
    """The exported weights include the scale. The exported config.json has no fields for the scale or a missing
    bias."""
    folder = write_value_model(tmp_path / "model", "llama", 3, "value_head", 0.25)
    normalisation = {"normalize_reward": True, "mean": 2.0, "std": 0.5, "value_head_prefix": "value_head"}
    content = json.loads((folder / "config.json").read_text()) | normalisation | {"token_classification_bias": False}
    (folder / "config.json").write_text(json.dumps(content))
    arch = read_architecture(folder)
    head = SafetensorsSource(folder, arch).value_head()
    assert head is not None and head.bias.tolist() == [-3.5]
    trunk = {n: t for n, t in load_file(folder / "model.safetensors").items() if n.startswith("model.")}
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    out = tmp_path / "out"
    write_critic(out, arch, (trunk | dict(zip(EXPORTED, head, strict=True))).items(), tokenizer)
    again = SafetensorsSource(out, read_architecture(out)).value_head()
    assert again is not None
    assert torch.equal(again.weight, head.weight) and torch.equal(again.bias, head.bias)
    assert not normalisation.keys() & json.loads((out / "config.json").read_text()).keys()
    model, info = AutoModelForTokenClassification.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(model.score.bias, head.bias)


TRUNK = ("model.norm.weight", "lm_head.weight")


def test_value_head_names_are_detected() -> None:
    assert find_value_head(TRUNK) is None
    for stem in ("score", "v_head.summary", "v_head", "value_head"):
        head = find_value_head([*TRUNK, f"{stem}.weight", f"{stem}.bias"])
        assert head == ValueHeadNames(f"{stem}.weight", f"{stem}.bias")
        assert find_value_head([*TRUNK, f"{stem}.weight"]) == ValueHeadNames(f"{stem}.weight", None)
    assert find_value_head([*TRUNK, "rm.weight"]) is None
    assert find_value_head([*TRUNK, "rm.weight"], "rm") == ValueHeadNames("rm.weight", None)


@pytest.mark.parametrize("names", [("v_head.0.weight", "v_head.2.weight"), ("score.weight", "v_head.weight"),
                                   ("score.bias",), ("score.weight", "score.norm.weight")])  # fmt: skip
def test_heads_other_than_one_linear_layer_are_rejected(names: tuple[str, ...]) -> None:
    message = r"the head of a critic is one linear layer with a weight and an optional bias"
    with pytest.raises(ValueError, match=message):
        find_value_head([*TRUNK, *names])


def head_of(folder: Path, **settings: Any) -> ValueHeadWeights | None:
    """Return the head of a folder with additional settings in config.json."""
    config = AutoConfig.from_pretrained(folder)
    for name, value in settings.items():
        setattr(config, name, value)
    return SafetensorsSource(folder, architecture(config)).value_head()


def test_trained_head_is_read(tmp_path: Path) -> None:
    folder = write_value_model(tmp_path / "m", "llama", 3, "value_head", 0.25)
    stored = load_file(folder / "model.safetensors")
    head = head_of(folder)
    assert head is not None
    assert torch.equal(head.weight, stored["value_head.weight"])
    assert head.bias.tolist() == [0.25]
    # Values that another trainer normalised do not change.
    scaled = head_of(folder, normalize_reward=True, mean=2.0, std=0.5)
    assert scaled is not None
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    values = (hidden @ head.weight.T + head.bias - 2.0) / 0.5
    torch.testing.assert_close(hidden @ scaled.weight.T + scaled.bias, values)


def test_head_in_a_separate_file_is_read(tmp_path: Path) -> None:
    folder = write_value_model(tmp_path / "m", "llama", 3, "v_head.summary", 0.25)
    tensors = load_file(folder / "model.safetensors")
    head = {name: tensors.pop(name) for name in list(tensors) if name.startswith("v_head")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert head_of(folder) is None
    save_file(head, folder / "value_head.safetensors")
    loaded = head_of(folder)
    assert loaded is not None
    assert torch.equal(loaded.weight, head["v_head.summary.weight"])


def test_head_with_nan_is_rejected(tmp_path: Path) -> None:
    folder = write_value_model(tmp_path / "m", "llama", 3, "v_head.summary", float("nan"))
    with pytest.raises(ValueError, match=r"tensor 'v_head.summary.bias' in .*model.safetensors contains nan, must be"):
        head_of(folder)


def test_head_with_two_labels_is_rejected(tmp_path: Path) -> None:
    folder = write_value_model(tmp_path / "m", "llama", 3)
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = torch.zeros(2, 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = r"'score\.weight' has shape \(2, 32\) and type F32; a critic returns one value"
    with pytest.raises(ValueError, match=message):
        head_of(folder)
