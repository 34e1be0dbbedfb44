"""Checkpoints of plain Megatron-Core models start our actor and critic on other layouts, and ours load into them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.harness import ask
from tests.support.models import VOCAB, write_model

# Not marked `versions`: torch 2.13 names groups by how many a rank is in, and Megatron makes uneven ones here.
pytestmark = [pytest.mark.slow, pytest.mark.waits]

# The layout that a plain model is saved and loaded on, how its tensors are named, and the layout that ours starts on.
CASES: dict[str, dict[str, Any]] = {
    "dense-tp2-to-pp2": {"tp": 2, "padded_vocab": 256, "other": {"pp": 2}},
    "tied-pp2-to-tp2": {
        "pp": 2, "padded_vocab": VOCAB + 1, "metadata": {"non_homogeneous_layers": True}, "other": {"tp": 2},
    },
    "experts-ep2-to-tp2": {"ep": 2, "padded_vocab": VOCAB, "plain_norms": True, "other": {"tp": 2, "sp": True}},
    "experts-tp2-to-ep2": {
        "tp": 2, "padded_vocab": 256, "metadata": {"singleton_local_shards": True}, "other": {"ep": 2},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all cases say, in one world of two processes."""
    root = tmp_path_factory.mktemp("torch_dist")
    told: dict[str, Any] = {}
    for name, case in CASES.items():
        family = "qwen3_moe" if name.startswith("experts") else "qwen3"
        folder = write_model(root / name / "model", family, 3, tie_word_embeddings=name.startswith("tied"))
        told[name] = {"folder": str(folder), "root": str(root / name), **case}
    return dict(ask("torch_dist_worker.py", 2, told))


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_models_begin_with_what_megatron_saved(found: dict[str, Any], name: str) -> None:
    """Log-probabilities are those of the plain model, values the head's of its hidden states."""
    assert found[name]["actor"] < 1e-4 and found[name]["critic"] < 1e-4, found[name]
    assert found[name]["largest"] > 1  # the model says something


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_megatron_loads_what_is_exported(found: dict[str, Any], name: str) -> None:
    """Into a plain model of another layout, which then says what transformers says."""
    assert found[name]["plain"] < 1e-4, found[name]
    assert found[name]["missing"] == []
    other_norm = "decoder.layers.pre_mlp_layernorm.weight"
    if CASES[name].get("plain_norms"):
        other_norm = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    assert found[name]["unused"] == ([other_norm] if name.startswith("experts") else [])
