"""Checkpoints of plain Megatron-Core models are read on other layouts, and exports are loaded into plain models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.harness import run_worker
from tests.support.models import VOCAB, write_model

# Not marked `versions`: torch 2.13 names groups by the number of groups of a rank, and Megatron makes uneven groups.
pytestmark = [pytest.mark.slow, pytest.mark.waits]

# The layout of a plain model, the names of its tensors, and the layout of the model that is started from it.
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
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of all cases in one run of two processes."""
    root = tmp_path_factory.mktemp("torch_dist")
    cases: dict[str, Any] = {}
    for name, case in CASES.items():
        family = "qwen3_moe" if name.startswith("experts") else "qwen3"
        folder = write_model(root / name / "model", family, 3, tie_word_embeddings=name.startswith("tied"))
        cases[name] = {"folder": str(folder), "root": str(root / name), **case}
    return dict(run_worker("torch_dist_worker.py", 2, cases))


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_models_start_from_checkpoints_of_megatron(results: dict[str, Any], name: str) -> None:
    """Log-probabilities equal those of the plain model. Values equal the value head of its hidden states."""
    assert results[name]["actor"] < 1e-4 and results[name]["critic"] < 1e-4, results[name]
    assert results[name]["largest"] > 1  # the outputs are not uniform


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_megatron_loads_exported_models(results: dict[str, Any], name: str) -> None:
    """The plain model has another layout, and then has the outputs of transformers."""
    assert results[name]["plain"] < 1e-4, results[name]
    assert results[name]["missing"] == []
    other_norm = "decoder.layers.pre_mlp_layernorm.weight"
    if CASES[name].get("plain_norms"):
        other_norm = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    assert results[name]["unused"] == ([other_norm] if name.startswith("experts") else [])
