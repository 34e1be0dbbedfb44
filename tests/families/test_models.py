"""Each family on each layout matches transformers and streams the loaded weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.support.harness import run_worker
from tests.support.models import quantise, write_model, write_value_model
from tests.support.quick import cases

pytestmark = [pytest.mark.slow, pytest.mark.waits]

ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip
PARTLY_ROTATED = ("glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
PARTIAL_YARN = {**ROPES["yarn"], "rope_theta": 500.0, "partial_rotary_factor": 0.5}
LAYOUTS: dict[str, dict[str, Any]] = {"one": {"tp": 1, "pp": 1}, "tp2": {"tp": 2, "pp": 1}, "pp2": {"tp": 1, "pp": 2}}
EXTRAS: dict[str, dict[str, Any]] = {
    "sp": {"tp": 2, "pp": 1, "sp": True},
    "vpp": {"tp": 1, "pp": 2, "vpp": 2},
    "uneven": {"tp": 1, "pp": 3, "chunk_layers": [1, 2, 1]},
    "recompute": {"tp": 2, "pp": 1, "train": True, "recompute": "full"},
    "selective": {"tp": 1, "pp": 2, "train": True, "recompute": "selective"},
    "tp2-pp2-apart": {"tp": 2, "pp": 2, "others": 1},  # the last rank has no weights
    "one_bucket": {"tp": 2, "pp": 1, "bucket_bytes": 1 << 30},
    "transformer_engine_names": {"tp": 2, "pp": 1, "fused": True, "train": True},
}
UNEVEN_CHUNKS = {"tp": 1, "pp": 2, "vpp": 2, "chunk_layers": [2, 1, 1, 3], "train": True}
EXPERTS: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "pp": 1}, "ep2": {"tp": 1, "pp": 1, "dp": 2, "ep": 2}, "tp2": {"tp": 2, "pp": 1, "sp": True},
    "tp2-ep2": {"tp": 2, "pp": 1, "sp": True, "ep": 2, "train": True, "recompute": "full"},
    "vpp2": {"tp": 1, "pp": 2, "vpp": 2, "bucket_bytes": 1 << 30}, "uneven": {"tp": 1, "pp": 2, "chunk_layers": [3, 1]},
    "raw-ep2": {"tp": 1, "pp": 1, "dp": 2, "ep": 2}, "cp2-ep2": {"tp": 1, "pp": 1, "cp": 2, "ep": 2, "train": True},
}  # fmt: skip
RAGGED = [2, 65, 1, 129, 64, 70]
GLM: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "pp": 1},
    "ep2": {"tp": 1, "pp": 1, "dp": 2, "ep": 2, "train": True, "recompute": "selective"},
    "tp2": {"tp": 2, "pp": 1, "sp": True},
    "tp2-ep2": {"tp": 2, "pp": 1, "sp": True, "ep": 2, "train": True, "recompute": "full"},
    "pp2": {"tp": 1, "pp": 2, "bucket_bytes": 1 << 30},
    "vpp2": {"tp": 1, "pp": 2, "vpp": 2},
    "uneven": {"tp": 1, "pp": 2, "chunk_layers": [1, 3]},
}
# Linear attention and attention layers alternate. Some samples have more than one chunk.
QWEN3_NEXT: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "pp": 1, "tokens": RAGGED},
    "ep2": {"tp": 1, "pp": 1, "dp": 2, "ep": 2, "train": True, "recompute": "selective"},
    "tp2": {"tp": 2, "pp": 1, "sp": True, "tokens": RAGGED},
    "tp2-ep2": {"tp": 2, "pp": 1, "sp": True, "ep": 2, "train": True, "recompute": "full"},
    "pp2": {"tp": 1, "pp": 2, "bucket_bytes": 1 << 30, "tokens": RAGGED},
    "vpp2": {"tp": 1, "pp": 2, "vpp": 2},
    "uneven": {"tp": 1, "pp": 2, "chunk_layers": [1, 3]},
}
QWEN3_5: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "pp": 1, "tokens": RAGGED},
    "tp2": {"tp": 2, "pp": 1, "train": True, "recompute": "full", "tokens": RAGGED},
    "sp2": {"tp": 2, "pp": 1, "sp": True, "tokens": RAGGED},
    "pp2": {"tp": 1, "pp": 2, "train": True, "recompute": "selective"},
}
# Each case has sinks, windows and biases.
GPT_OSS: dict[str, dict[str, Any]] = {"one": {"tp": 1, "pp": 1}, "tp2": {"tp": 2, "pp": 1, "sp": True},
    "pp2": {"tp": 1, "pp": 2, "train": True, "recompute": "selective"}, "ep2": {"tp": 1, "pp": 1, "dp": 2, "ep": 2},
    "tp2-ep2": {"tp": 2, "pp": 1, "sp": True, "ep": 2, "train": True, "recompute": "full"},
    "cp2": {"tp": 1, "pp": 1, "cp": 2, "train": True}}  # fmt: skip
# Queries without a latent and one group of experts, rotation like in other families, and context ranks.
LATENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "moonlight-tp2": ({"q_lora_rank": None, "n_group": 1, "topk_group": 1}, {"tp": 2, "pp": 1, "sp": True}),
    "neighbours-apart": ({"q_lora_rank": None, "rope_interleave": False}, {"tp": 2, "pp": 1}),
    "cp2": ({}, {"tp": 1, "pp": 1, "cp": 2, "train": True, "recompute": "selective"}),
}
MIXTRAL = {name: EXPERTS[name] for name in ("one", "ep2", "tp2", "uneven")}
GEMMA: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "pp": 1},
    "tp2": {"tp": 2, "pp": 1, "train": True, "recompute": "full"},
    "sp2": {"tp": 2, "pp": 1, "sp": True},
    "pp2": {"tp": 1, "pp": 2, "train": True, "recompute": "selective"},
    "cp2": {"tp": 1, "pp": 1, "cp": 2, "train": True},
}
SLIDING = {"use_sliding_window": True, "sliding_window": 7}
# Context parallel ranks, with a window if the family supports windows.
CONTEXT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral-cp2": ("mistral", {"sliding_window": 7}, {"tp": 1, "pp": 1, "cp": 2, "train": True}),
    "llama-cp3": ("llama", {"num_key_value_heads": 1}, {"tp": 1, "pp": 1, "cp": 3, "recompute": "full", "train": True}),
    "qwen2-cp2-tp2-sp": ("qwen2", {"tie_word_embeddings": True}, {"tp": 2, "pp": 1, "cp": 2, "sp": True}),
    "qwen3-cp2-pp2": ("qwen3", {**SLIDING, "max_window_layers": 1},
        {"tp": 1, "pp": 2, "cp": 2, "train": True, "recompute": "selective"}),
}  # fmt: skip

# The kernels of CUDA in the interpreter of Triton.
KERNELS: dict[str, Any] = {"tp": 1, "pp": 1, "train": True, "kernels": True}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding": ("qwen3", {**SLIDING, "max_window_layers": 0}),
    "window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}),
    "some-sliding": ("qwen3", {**SLIDING, "max_window_layers": 2}),
    "one_expert": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
}


# Value heads in the formats of transformers, TRL and OpenRLHF.
HEADS: dict[str, tuple[str, float | None, dict[str, Any]]] = {
    "transformers": ("score", 0.5, {"tp": 2, "pp": 1, "sp": True}),
    "trl": ("v_head.summary", -0.5, {"tp": 1, "pp": 2}),
    "openrlhf": ("value_head", None, {"tp": 1, "pp": 1}),
}


# The proportions of SmolLM2: 9 heads and 3 key/value heads exclude TP2.
NINE_HEADS = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
OUTSIDE = "tests.support.outside_family:FAMILY"
Case = dict[str, Any]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def named_cases() -> Iterator[tuple[str, Callable[[Path], Case]]]:
    """Yield the name of each case and a function that writes the model and returns the request for the worker."""
    for family, tied, (name, layout) in itertools.product(FAMILIES, (False, True), LAYOUTS.items()):
        changes: dict[str, Any] = {"sliding_window": 7} if family == "mistral" else {}
        changes["tie_word_embeddings"] = tied
        yield f"{family}-{'tied' if tied else 'untied'}-{name}", partial(plain_case, family, changes, layout)
    for name, extra in EXTRAS.items():
        yield f"qwen3-{name}", partial(plain_case, "qwen3", {"tie_word_embeddings": True}, extra)
    for name, layout in EXPERTS.items():
        raw = name.startswith("raw")  # the softmax over all experts without normalisation
        yield f"qwen3_moe-{name}", partial(plain_case, "qwen3_moe", {"norm_topk_prob": not raw}, layout)
    for name, layout in MIXTRAL.items():
        yield f"mixtral-{name}", partial(plain_case, "mixtral", {"sliding_window": 7}, layout)
    for name, layout in GLM.items():
        yield f"glm4_moe-{name}", partial(plain_case, "glm4_moe", {}, layout)
    for name, layout in GPT_OSS.items():
        yield f"gpt_oss-{name}", partial(plain_case, "gpt_oss", {}, layout)
    yield "glm4_moe-groups", partial(plain_case, "glm4_moe", {"n_group": 4, "topk_group": 2}, GLM["tp2-ep2"])
    for name, layout in GLM.items():
        yield f"deepseek_v3-{name}", partial(plain_case, "deepseek_v3", {}, layout)
    for name, (changes, layout) in LATENT.items():
        yield f"deepseek_v3-{name}", partial(plain_case, "deepseek_v3", changes, layout)
    for name, layout in QWEN3_NEXT.items():
        yield f"qwen3_next-{name}", partial(plain_case, "qwen3_next", {"max_position_embeddings": 256}, layout)
    for name, layout in QWEN3_5.items():
        yield f"qwen3_5_text-{name}", partial(plain_case, "qwen3_5_text", {"tie_word_embeddings": True}, layout)
    yield "qwen3_5_moe_text-tp2-ep2", partial(plain_case, "qwen3_5_moe_text", {}, QWEN3_NEXT["tp2-ep2"])
    for family, (name, layout) in itertools.product(("gemma2", "gemma3_text", "gemma4_text"), GEMMA.items()):
        yield f"{family}-{name}", partial(plain_case, family, {}, layout)
    for name, (family, changes, layout) in CONTEXT.items():
        yield name, partial(plain_case, family, changes, layout)
    for name, (family, changes) in SETTINGS.items():
        yield f"{family}-{name}", partial(plain_case, family, changes, {**LAYOUTS["one"], "train": True})
    for family in ("qwen3", "qwen3_moe"):
        yield f"{family}-kernels", partial(plain_case, family, {"num_hidden_layers": 2}, KERNELS)
    yield "llama-uneven_chunks", partial(plain_case, "llama", {"num_hidden_layers": 7}, UNEVEN_CHUNKS)
    yield "qwen3-float8", float8_case
    for name, (head, bias, layout) in HEADS.items():
        yield f"critic-{name}", partial(critic_case, "qwen2", head, bias, layout)
    for family in ("gemma2", "gemma3_text", "gemma4_text"):
        yield f"{family}-critic", partial(critic_case, family, "value_head", 0.5, GEMMA["pp2"])
    yield "mixtral-critic", partial(critic_case, "mixtral", "score", 0.5, EXPERTS["tp2-ep2"])
    for rope, parameters in ROPES.items():
        yield f"rope-{rope}", partial(plain_case, "llama", {"rope_parameters": parameters}, LAYOUTS["tp2"])
    for family in PARTLY_ROTATED:
        changes = {"rope_parameters": PARTIAL_YARN}
        yield f"{family}-partial_yarn", partial(plain_case, family, changes, {"tp": 2, "pp": 1, "sp": True})
    for name, layout in LAYOUTS.items():
        yield f"outside-{name}", partial(plain_case, "arcee", {}, {**layout, "family": OUTSIDE, "train": True})
    yield "nine-heads-tp3", partial(plain_case, "llama", NINE_HEADS, {"tp": 3, "pp": 1})


def plain_case(family: str, changes: dict[str, Any], layout: Case, root: Path) -> Case:
    return {"folder": str(write_model(root / "model", family, 3, **changes)), **layout}


def critic_case(family: str, head: str, bias: float | None, layout: Case, root: Path) -> Case:
    folder = write_value_model(root / "model", family, 3, head, bias, tie_word_embeddings=True)
    return {"folder": str(folder), "value_head_std": 0.0, **layout}


def float8_case(root: Path) -> Case:
    """Return the case of a float8 model that is compared with the dequantised model."""
    model = write_model(root / "model", "qwen3", 3, tie_word_embeddings=False)
    plain = quantise(model, root / "float8", (16, 9))
    tensors = {name: tensor.float() for name, tensor in plain.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return {"folder": str(root / "float8"), "plain": str(model), **LAYOUTS["tp2"]}


CASES = dict(named_cases())


_DISTINCT = ("partial_yarn", "tp2", "pp2", "tp2-ep2", "cp2", "moonlight-tp2", "neighbours-apart", "groups", "critic")
"""Layouts and settings with code that is specific to a family."""


def is_covered(name: str) -> bool:
    """Return whether the case is covered by other cases. Qwen3 and its variant with experts run all layouts. The other
    families of megappo run only distinct layouts."""
    family, _, layout = name.partition("-")
    if family in FAMILIES and layout.startswith(("tied", "untied")):
        return family != "qwen3" and layout not in ("untied-tp2", "untied-pp2")
    others = MIXTURES | GEMMAS | {"qwen3_5_text"}
    return family in others and layout not in _DISTINCT


MIXTURES = {"mixtral", "glm4_moe", "gpt_oss", "deepseek_v3", "qwen3_next"}
GEMMAS = {"gemma2", "gemma3_text", "gemma4_text"}
ENOUGH = ("qwen3-tied-tp2", "qwen3-tied-pp2", "qwen3_moe-tp2-ep2", "outside-tp2", "mistral-cp2")


@pytest.mark.versions
@pytest.mark.parametrize("name", cases(CASES, quick=ENOUGH, exhaustive=[*filter(is_covered, CASES)]))
def test_models_match_transformers_and_stream_weights(tmp_path: Path, name: str) -> None:
    case = CASES[name](tmp_path)
    processes = max(2, case["tp"] * case["pp"] * case.get("dp", 1) * case.get("cp", 1) + case.get("others", 0))
    result: dict[str, Any] = run_worker("model_worker.py", processes, case)
    assert result["largest"] > 1  # the model has distinct predictions
    # Nats, or the relative error for values.
    assert result["error"] < 1e-5 * (result["largest"] if "value_head_std" in case else 1)
    assert result["stream"] == 0
    # Two microbatches, two layers, and rotations of queries and keys forward and backward.
    assert result["launches"] == ([4, 4, 16] if case.get("kernels") else [0, 0, 0])


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_router_biases_are_not_rounded(tmp_path: Path, family: str) -> None:
    """A bfloat16 bias would be coarser than the scores. The routers of GLM are also in float32."""
    folder = write_model(tmp_path / "model", family, 3)
    result: dict[str, Any] = run_worker(
        "model_worker.py", 2, {"folder": str(folder), "tp": 1, "pp": 2, "dtype": "bfloat16", "train": True}
    )
    gates = [f"model.layers.{layer}.mlp.gate" for layer in (1, 2, 3)]
    biases = [f"{gate}.e_score_correction_bias" for gate in gates]
    assert result["float32"] == sorted([*biases, *(f"{gate}.weight" for gate in gates if family == "glm4_moe")])
    assert result["unrounded"] == biases
    assert 1e-5 < result["error"] < 1  # rounding of bfloat16
