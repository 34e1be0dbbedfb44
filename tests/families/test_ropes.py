"""Each rope type and partial rotation of a family matches transformers, or an error is raised."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from megappo.families import FAMILIES, architecture
from megappo.families.rope import rope_kinds, rotary, rotary_scales
from megappo.megatron.layers.rotary import PackedRotary
from megappo.models.model_files import read_architecture
from tests.support.models import write_model

POSITIONS = torch.tensor([0, 1, 7, 30, 63])
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-factor": {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3, "truncate": False},
    "yarn-mscale": {"factor": 2.5, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-stretch": {"factor": None, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 2.0, "original_max_position_embeddings": 32, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    },
}  # fmt: skip
PARTS = (None, 0.25, 0.5, 0.75, 1.0)
OWN_ROPES = ("gemma3_text",)
"""Families with a separate rope for each kind of layer. tests/plan/test_attention_kinds.py tests Gemma 4."""


def changed_config(folder: Path, name: str, part: float | None) -> Any:
    """Return the configuration of a folder with a different rope, after saving and loading. A separate rope of
    layers with a window does not change."""
    config: Any = AutoConfig.from_pretrained(folder)
    rope: dict[str, Any] = {"rope_type": name.partition("-")[0], "rope_theta": 500.0, **TYPES[name]}
    rope |= {} if part is None else {"partial_rotary_factor": part}
    kinds = rope_kinds(architecture(config))
    config.rope_parameters = rope if not kinds else {**config.rope_parameters, "full_attention": rope}
    config.save_pretrained(folder / "changed")
    return AutoConfig.from_pretrained(folder / "changed")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma4_text"])
def test_ropes_match_transformers_or_are_rejected(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / "model", family, 1, num_hidden_layers=2, head_dim=8)
    compared, refused = set[str](), set[str]()
    for name, part in itertools.product(TYPES, PARTS):
        config = changed_config(folder, name, part)
        try:
            arch = architecture(config)
        except ValueError as error:
            assert "; " in str(error)
            refused.add(name)
            continue
        module: Any = AutoModel.from_config(config, dtype=torch.float32).rotary_emb
        ours = PackedRotary(rotary(arch))
        angles, kinds = ours(POSITIONS, packed_seq=True, cp_group=None), rope_kinds(arch)
        assert rotary_scales(arch) == tuple(rope.scale for rope in rotary(arch))
        for number, kind in enumerate(kinds or (None,)):
            of_kind = angles if kind is None or len(kinds) == 1 else ours.of_kind(number, angles)
            options = {} if kind is None else {"layer_type": kind}
            cosine, sine = module(torch.zeros(1, len(POSITIONS), 1), POSITIONS[None], **options)
            expected = torch.stack((cosine[0], sine[0]))[:, :, None]
            if 2 * expected.shape[-1] == of_kind.shape[-1]:  # gpt-oss stores each pair only once
                expected = torch.cat((expected, expected), dim=-1)
            torch.testing.assert_close(of_kind, expected.float(), rtol=0, atol=1e-6)
        compared.add(name)
    assert "default" in compared
    assert {"dynamic", "longrope"} <= refused
    assert family in OWN_ROPES or compared == set(TYPES) - {"dynamic", "longrope"}


NUMBERS = {
    "default": ("rope_theta", "partial_rotary_factor"),
    "linear": ("rope_theta", "factor"),
    "llama3": tuple(TYPES["llama3"]),
    "yarn": ("rope_theta", *TYPES["yarn"], "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
"""Numbers that transformers reads for each rope type."""
BAD_VALUES: tuple[Any, ...] = ("4", None, 0, -4.0, True, [4.0], float("nan"), float("inf"))
DEFAULTS = {("yarn", name): (None,) for name in ("factor", "attention_factor")} | {
    ("yarn", name): (None, 0) for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
}
"""Values of these numbers for which transformers has a default."""


def read_rope(folder: Path, rope: dict[str, Any]) -> Any:
    """Return the architecture of a folder with another rope in config.json."""
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"rope_parameters": rope}))
    return read_architecture(folder)


@pytest.mark.parametrize("rope_type", NUMBERS)
def test_rope_numbers_are_checked(tmp_path: Path, rope_type: str) -> None:
    """Errors for text, null, zero, negative and infinite numbers name the field. Values with a default give finite
    results."""
    folder = write_model(tmp_path / "model", "qwen3", 1)
    good = {"rope_type": rope_type, "rope_theta": 500.0, **TYPES[rope_type]}
    read_rope(folder, good)
    for name, value in itertools.product(NUMBERS[rope_type], BAD_VALUES):
        rope = {**good, name: value}
        if value in DEFAULTS.get((rope_type, name), ()) and not isinstance(value, bool):
            (of_all,) = rotary(read_rope(folder, rope))
            assert of_all.inverse_frequencies.isfinite().all() and of_all.scale > 0, (name, value)
        else:
            with pytest.raises(ValueError, match=f"{name} of rope_parameters is .*, must be a number .*; fix config"):
                read_rope(folder, rope)


@pytest.mark.parametrize("value", ["10000", 0, -1.0, True, None, 10**400])
def test_base_outside_of_the_rope_is_checked(tmp_path: Path, value: Any) -> None:
    """Files of earlier versions of transformers have `rope_theta` outside of `rope_scaling`."""
    path = write_model(tmp_path / "model", "qwen3", 1) / "config.json"
    stored = json.loads(path.read_text())
    del stored["rope_parameters"]
    path.write_text(json.dumps(stored | {"rope_theta": 5e5}))
    assert read_architecture(path.parent).hf_config.rope_parameters["rope_theta"] == 5e5
    path.write_text(json.dumps(stored | {"rope_theta": value}))
    message = r"rope_theta of config.json is .*, must be a number above 1 for any rope type"
    with pytest.raises(ValueError, match=message):
        read_architecture(path.parent)
    path.write_text(json.dumps(stored | {"rope_scaling": {"type": "linear", "factor": value}}))
    with pytest.raises(ValueError, match=r"factor of rope_scaling is .*, must be a number above 0 for rope type 'lin"):
        read_architecture(path.parent)


@pytest.mark.parametrize("rope", [{"rope_theta": -1.0}, {"rope_theta": "10000"}, {"full_attention": {"rope_theta": 0}}])
def test_rope_without_a_type_is_the_default_rope(tmp_path: Path, rope: dict[str, Any]) -> None:
    folder = write_model(tmp_path / "model", "qwen3", 1)
    message = r"rope_theta of rope_parameters is .*, must be a number above 1 for rope type"
    with pytest.raises(ValueError, match=message):
        read_rope(folder, rope)


def test_frequencies_of_llama3_must_increase(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500.0, **TYPES["llama3"], "high_freq_factor": 1.0}
    with pytest.raises(ValueError, match=r"high_freq_factor 1.0 of rope_parameters must exceed low_freq_factor 1.0"):
        read_rope(write_model(tmp_path / "model", "qwen3", 1), rope)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text"])
def test_rope_of_each_layer_type_is_checked(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / "model", family, 1)
    ropes = json.loads((folder / "config.json").read_text())["rope_parameters"]
    for kind in ropes:
        changed = {**ropes, kind: {**ropes[kind], "rope_theta": -1.0}}
        with pytest.raises(ValueError, match=r"rope_theta of rope_parameters is -1.0, must be a number above 1"):
            read_rope(folder, changed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 0), ("num_attention_heads", -4), ("head_dim", 0), ("intermediate_size", -1), ("vocab_size", 0),
        ("max_position_embeddings", 0), ("rms_norm_eps", -1e-6), ("initializer_range", -0.02),
    ],
)  # fmt: skip
def test_sizes_must_be_positive(tmp_path: Path, name: str, value: float) -> None:
    folder = write_model(tmp_path / "model", "qwen3", 1)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=f"{name} is {value}, must be positive; fix config.json"):
        read_architecture(folder)
