"""What a family's config.json says is read as transformers reads it, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distributed.models import EXPERTS
from megappo.architecture import architecture
from megappo.config import ConfigError, model_shape
from megappo.families import FAMILIES

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
TOKENS = 24
WINDOW = 7
SLIDING = {"layer_types": ["sliding_attention"]}
FULL = {"layer_types": ["full_attention"]}
ON = {"sliding_window": WINDOW, "use_sliding_window": True}
TRAITS: list[dict[str, Any]] = [
    {},
    FULL,
    SLIDING,
    {"sliding_window": None},
    {"sliding_window": WINDOW},
    ON,
    ON | {"max_window_layers": 0},
    ON | SLIDING,
    ON | FULL,
    {"sliding_window": None} | SLIDING,
]


def written(folder: Path, family: str, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = SIZES | (EXPERTS if family == "qwen3_moe" else {}) | {"model_type": family} | changes
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def seen_tokens(config: Any) -> int:
    """How many tokens a token of a model of one layer sees in transformers, itself included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    tokens = torch.arange(2, 2 + TOKENS)[None]
    other = tokens.clone()
    other[0, 0] = 1
    with torch.no_grad():
        moved = (model(tokens).logits - model(other).logits)[0].abs().amax(-1) > 1e-9
    return int(moved.sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_those_of_transformers_or_refused(tmp_path: Path, family: str) -> None:
    accepted = 0
    for number, traits in enumerate(TRAITS):
        config = AutoConfig.from_pretrained(written(tmp_path / str(number), family, **traits))
        try:
            window = architecture(config).sliding_window
        except ValueError as error:
            assert "sliding_window" in str(error) or "'ministral' is not supported" in str(error), traits
            continue
        accepted += 1
        if family == "qwen3_moe":
            config._experts_implementation = "eager"
        assert seen_tokens(config) == (TOKENS if window is None else min(window, TOKENS)), traits
    assert accepted >= 3


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"sliding_window": WINDOW}, "sliding_window 7 means nothing to transformers for llama"),
        ("llama", SLIDING, "layer_types of 'sliding_attention' contradicts what transformers computes for this llama"),
        ("qwen3", {"sliding_window": 0, "use_sliding_window": True}, "sliding_window 0 must be at least 1 token"),
        ("qwen3_moe", ON | FULL, "layer_types of 'full_attention' contradicts"),
        ("qwen3_moe", SLIDING, "no sliding_window; make layer_types and sliding_window of config.json agree"),
        # transformers reads it as the family whose layers differ.
        ("mistral", SLIDING, "model_type 'ministral' is not supported"),
        ("qwen2", {"layer_types": ["chunked_attention"]}, "layer_types of 'chunked_attention' is not supported"),
        ("llama", {"layer_types": ["linear_attention"]}, "layer_types of 'linear_attention' is not supported"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
            "a mix of full and sliding attention layers is not supported",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor 0.25 is not supported",
        ),
        (
            "qwen3",
            FULL | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "rope_parameters of 'full_attention' are not supported",
        ),
        ("mistral", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("mistral", {"attention_bias": True}, "attention_bias: true is not supported"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias: true is not supported"),
        ("llama", {"per_layer_config": {"0": {"intermediate_size": 16}}}, "per_layer_config is not supported"),
        ("llama", {"is_causal": False}, "is_causal: false lets tokens see those after them"),
    ],
)
def test_settings_that_transformers_reads_otherwise_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        model_shape(str(written(tmp_path / "m", family, **changes)))
    assert len(caught.value.problems) == 1
    assert words in caught.value.problems[0]


def test_windows_that_are_switched_off_are_none(tmp_path: Path) -> None:
    """Where transformers has no windows and config.json says so; mistral's are there whatever it says."""
    off = {"sliding_window": WINDOW, "use_sliding_window": False}
    for family, window in (("llama", None), ("qwen2", None), ("mistral", WINDOW)):
        config = AutoConfig.from_pretrained(written(tmp_path / family, family, **off))
        assert architecture(config).sliding_window == window
        assert seen_tokens(config) == (window or TOKENS)


def test_settings_that_say_what_is_built_are_accepted(tmp_path: Path) -> None:
    said = {"partial_rotary_factor": 1.0, "attention_bias": False, "mlp_bias": False, "is_causal": True}
    for family in FAMILIES:
        kinds = {} if family == "mistral" else FULL
        assert model_shape(str(written(tmp_path / family, family, sliding_window=None, **said, **kinds))).layers == 1
