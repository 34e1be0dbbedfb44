"""Ropes of the real SGLang compared with transformers. A rope is rejected exactly if the two libraries differ."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megappo.families import architecture
from megappo.families.rope import rotary
from megappo.families.served import unread_rope
from tests.support.models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.waits]

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

THETA, CHANNELS, POSITIONS = 1e4, 8, 128
FIELDS: dict[str, dict[str, list[Any]]] = {
    "default": {},
    "linear": {"factor": [1.0, 3.5, 8.0]},
    "llama3": {
        "factor": [2.0, 8.0],
        "low_freq_factor": [1.0, 2.0],
        "high_freq_factor": [4.0, 8.0],
        "original_max_position_embeddings": [16, 32],
    },
    "yarn": {
        "factor": [1.0, 4.0, 2.5],
        "original_max_position_embeddings": [16, 32],
        "attention_factor": [None, 1.0, 1.3],
        "mscale": [None, 1.0, 0.707, 0.0],
        "mscale_all_dim": [None, 1.0, 0.4, 0.0],
        "beta_fast": [None, 32, 8],
        "beta_slow": [None, 1, 2],
        "truncate": [None, True, False],
        "attn_factor": [None, 1, 1.2],
        "extrapolation_factor": [None, 1, 0.5],
    },
}
"""Rope parameters and their possible values. None means that the parameter is absent."""


def ropes() -> list[dict[str, Any]]:
    """Return ropes with each value of each parameter, and two hundred random combinations per kind."""
    result = []
    for kind, fields in FIELDS.items():
        plain = {name: values[0] for name, values in fields.items()}
        alone = [{**plain, name: value} for name, values in fields.items() for value in values]
        draw = random.Random(1)
        mixed = [{name: draw.choice(values) for name, values in fields.items()} for _ in range(200 if fields else 0)]
        for chosen in [plain, *alone, *mixed]:
            parameters = {name: value for name, value in chosen.items() if value is not None}
            result.append({"rope_type": kind, "rope_theta": THETA, **parameters})
    return result


def of_sglang(rope: Mapping[str, Any], part: float) -> torch.Tensor:
    """Return cosines and sines of the first positions in SGLang, (positions, channels), for heads with partial
    rotation."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    size = round(CHANNELS / part)
    made = get_rope(size, size, POSITIONS, THETA, True, dict(rope), torch.float32, partial_rotary_factor=part)
    return made.cos_sin_cache[:POSITIONS].double()


def of_transformers(arch: Any, positions: int) -> torch.Tensor:
    """Return the same values as transformers computes them."""
    ((frequencies, scale),) = rotary(arch)
    angles = torch.arange(positions).double()[:, None] * frequencies.double()
    return scale * torch.cat([angles.cos(), angles.sin()], dim=-1)


@pytest.mark.parametrize(("family", "part"), [("llama", 1.0), ("glm4_moe", 0.5), ("glm4_moe", 0.25)])
def test_accepted_ropes_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, part: float) -> None:
    """Rejected ropes differ. For each parameter, some rope is rejected or both libraries read the parameter."""
    kernel = ModuleType("vllm._custom_ops")  # imported on a CPU, but not called
    kernel.rotary_embedding = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", kernel)
    sizes = {"num_hidden_layers": 2, "head_dim": round(CHANNELS / part)}
    config = AutoConfig.from_pretrained(write_model(tmp_path / "m", family, 1, **sizes))
    equal = refused = 0
    for rope in ropes():
        config.rope_parameters = {**rope, "partial_rotary_factor": part}
        arch = architecture(config)
        theirs = of_sglang(config.rope_parameters, part)
        apart = float((theirs - of_transformers(arch, len(theirs))).abs().max())
        why = unread_rope(arch)
        assert apart < 1e-5 if not why else apart > 1e-4 or rope.get("factor") == 1, (rope, why, apart)
        equal, refused = equal + (not why), refused + bool(why)
    assert equal > 100 and refused > 100
    assert not set(itertools.chain(*FIELDS.values())) - set(itertools.chain(*ropes()))
