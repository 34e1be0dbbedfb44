"""`start_from` accepts a model folder only if transformers computes the same log-probabilities with its
configuration."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.config import ConfigError
from megappo.families import FAMILIES
from megappo.models.model_files import read_architecture
from megappo.ppo.assembly.origins import open_origin
from tests.support.models import write_model

TOKENS = torch.arange(2, 66)[None]
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 500.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "stretched": {"rope_parameters": {**YARN, "factor": None}},
    "yarn": {"rope_parameters": {**YARN, "factor": 4.0}},
}
NAMES = ("model_type", "transformers_version", "dtype", "architectures", "_name_or_path", "torch_dtype")


def models() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for family in FAMILIES:
        yield family, family, {}
    yield from (("llama-stretched", "llama", ROPES["stretched"]), ("glm4_moe-yarn", "glm4_moe", ROPES["yarn"]))


MODELS = {name: (family, changes) for name, family, changes in models()}


def alternatives(value: Any) -> list[Any]:
    """Return other values of a field of config.json. Text and lists have no other values."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value] if value > 0 else [value + 1]
    if isinstance(value, float):
        return [1.5 * value, 0.5 * value]
    return []


def changed_fields(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, config.json) with one changed number or switch, including the fields of ropes."""
    for name, value in content.items():
        if name in NAMES:
            continue
        for other in alternatives(value):
            yield name, {**content, name: other}
        for inner, inner_value in value.items() if isinstance(value, dict) else ():
            for other in alternatives(inner_value):
                changed = copy.deepcopy(content)
                changed[name][inner] = other
                yield f"{name}.{inner}", changed


def logprobs(folder: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Return log-probabilities of a model with the config.json of a folder and these weights, or None if shapes
    differ."""
    try:
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            computed: torch.Tensor = model(TOKENS).logits.log_softmax(-1)
    except Exception:  # noqa: BLE001 - transformers refuses impossible sizes in many ways
        return None
    return computed


@pytest.mark.parametrize("name", MODELS)
def test_folder_is_accepted_only_with_equal_results(tmp_path: Path, name: str) -> None:
    family, changes = MODELS[name]
    folder, other = write_model(tmp_path / "model", family, 3, num_hidden_layers=2, **changes), tmp_path / "other"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = model.state_dict()
    expected = logprobs(folder, weights)
    assert expected is not None
    arch, content = read_architecture(folder), json.loads((folder / "config.json").read_text())
    shutil.copytree(folder, other)
    differing, accepted = set(), set()
    for field, changed in changed_fields(content):
        (other / "config.json").write_text(json.dumps(changed))
        computed = logprobs(other, weights)
        is_different = computed is not None and not torch.allclose(computed, expected, rtol=0, atol=1e-5)
        try:
            open_origin(str(other), "actor", arch)
            accepted.add(field)
            assert not is_different, f"{field} changes log-probabilities, but the folder is accepted"
        except (ValueError, ConfigError):
            differing |= {field} if is_different else set()
    assert "rms_norm_eps" in differing and "max_position_embeddings" in (differing if "stretched" in name else accepted)
    if family == "gpt_oss":
        assert differing >= {"swiglu_limit", "swiglu_alpha"}
