"""Scalar heads of value models from other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from megappo.families import architecture
from megappo.families.weights import ValueHeadWeights
from megappo.reshard.sources import SafetensorsSource
from megappo.reshard.value_heads import ValueHeadNames, find_value_head
from tests.support.models import write_value_model

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
    with pytest.raises(
        ValueError, match=r"the head of a critic is one linear layer with a weight and an optional bias"
    ):
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
    with pytest.raises(
        ValueError, match=r"'score\.weight' has shape \(2, 32\) and type F32; a critic returns one value"
    ):
        head_of(folder)
