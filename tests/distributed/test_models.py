"""Every family on every layout computes what transformers computes, and streams the weights it was given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from distributed.harness import launch
from distributed.models import quantise, write_model, write_value_model

ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "pp": 1},
    "tp2": {"tp": 2, "pp": 1},
    "pp2": {"tp": 1, "pp": 2},
}
EXTRAS: dict[str, dict[str, Any]] = {
    "sp": {"tp": 2, "pp": 1, "sp": True},
    "vpp": {"tp": 1, "pp": 2, "vpp": 2},
    "recompute": {"tp": 2, "pp": 1, "train": True, "recompute": "full"},
    "selective": {"tp": 1, "pp": 2, "train": True, "recompute": "selective"},
    "one_bucket": {"tp": 2, "pp": 1, "bucket_bytes": 1 << 30},
    "transformer_engine_names": {"tp": 2, "pp": 1, "fused": True, "train": True},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "pp": 1},
    "ep2": {"tp": 1, "pp": 1, "dp": 2, "ep": 2},
    "tp2": {"tp": 2, "pp": 1, "sp": True},
    "tp2-ep2": {"tp": 2, "pp": 1, "sp": True, "ep": 2, "train": True, "recompute": "full"},
    "vpp2": {"tp": 1, "pp": 2, "vpp": 2, "bucket_bytes": 1 << 30},
    "raw-ep2": {"tp": 1, "pp": 1, "dp": 2, "ep": 2},
}

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding": ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}),
    "one_expert": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
}


# As transformers' classifiers, TRL and OpenRLHF write the head of a value model.
HEADS: dict[str, tuple[str, float | None, dict[str, Any]]] = {
    "transformers": ("score", 0.5, {"tp": 2, "pp": 1, "sp": True}),
    "trl": ("v_head.summary", -0.5, {"tp": 1, "pp": 2}),
    "openrlhf": ("value_head", None, {"tp": 1, "pp": 1}),
}


def _cases(root: Path) -> list[dict[str, Any]]:
    cases = []
    for family in ("llama", "qwen2", "qwen3", "mistral"):
        changes: dict[str, Any] = {"sliding_window": 7} if family == "mistral" else {}
        for tied in (False, True):
            folder = write_model(root / f"{family}-{tied}", family, 3, tie_word_embeddings=tied, **changes)
            for name, layout in LAYOUTS.items():
                cases.append(
                    {"name": f"{family}-{'tied' if tied else 'untied'}-{name}", "folder": str(folder), **layout}
                )
    for name, extra in EXTRAS.items():
        cases.append({"name": f"qwen3-{name}", "folder": str(root / "qwen3-True"), **extra})
    for name, layout in EXPERTS.items():
        raw = name.startswith("raw")  # the weights of a token's experts as the softmax over all gives them
        folder = write_model(root / f"qwen3_moe-{raw}", "qwen3_moe", 3, norm_topk_prob=not raw)
        cases.append({"name": f"qwen3_moe-{name}", "folder": str(folder), **layout})
    for name, (family, changes) in SETTINGS.items():
        folder = write_model(root / name, family, 3, **changes)
        cases.append({"name": f"{family}-{name}", "folder": str(folder), **LAYOUTS["one"], "train": True})
    plain = quantise(root / "qwen3-False", root / "float8", (16, 9))
    shutil.copytree(root / "qwen3-False", root / "plain")
    tensors = {name: tensor.float() for name, tensor in plain.items()}
    save_file(tensors, root / "plain" / "model.safetensors", metadata={"format": "pt"})
    folders = {"folder": str(root / "float8"), "plain": str(root / "plain")}
    cases.append({"name": "qwen3-float8", **folders, **LAYOUTS["tp2"]})
    for name, (head, bias, layout) in HEADS.items():
        folder = write_value_model(root / name, "qwen2", 3, head, bias, tie_word_embeddings=True)
        cases.append({"name": f"critic-{name}", "folder": str(folder), "value_head_std": 0.0, **layout})
    for rope, parameters in ROPES.items():
        folder = write_model(root / rope, "llama", 3, rope_parameters=parameters)
        cases.append({"name": f"rope-{rope}", "folder": str(folder), **LAYOUTS["tp2"]})
    return cases


# SmolLM2's proportions: 9 heads and 3 key/value heads rule TP2 out.
THREE = {"tp": 3, "pp": 1}

NAMES = [
    *(f"{f}-{t}-{n}" for f in ("llama", "qwen2", "qwen3", "mistral") for t in ("untied", "tied") for n in LAYOUTS),
    *(f"qwen3-{n}" for n in EXTRAS),
    *(f"qwen3_moe-{n}" for n in EXPERTS),
    *(f"{family}-{name}" for name, (family, _) in SETTINGS.items()),
    "qwen3-float8",
    *(f"critic-{h}" for h in HEADS),
    *(f"rope-{r}" for r in ROPES),
    "nine-heads-tp3",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp("models")
    cases, out = root / "cases.json", root / "out.json"
    cases.write_text(json.dumps(_cases(root)))
    launch("model_worker.py", 2, cases, out)
    found: dict[str, dict[str, float]] = json.loads(out.read_text())
    heads = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    folder = write_model(root / "nine", "llama", 3, **heads)
    cases.write_text(json.dumps([{"name": "nine-heads-tp3", "folder": str(folder), **THREE}]))
    launch("model_worker.py", 3, cases, out)
    return found | json.loads(out.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers(results: dict[str, dict[str, float]], name: str) -> None:
    assert results[name]["error"] < 1e-4
    assert results[name]["largest"] > 1  # the model says something


@pytest.mark.parametrize("name", NAMES)
def test_streams_what_was_loaded(results: dict[str, dict[str, float]], name: str) -> None:
    assert results[name]["stream"] == 0


def test_every_case_ran(results: dict[str, dict[str, float]]) -> None:
    assert set(results) == set(NAMES)
