"""Every rope type with every partial rotation of every family is that of transformers, or refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from megappo.families import FAMILIES, architecture
from megappo.families.rope import rope_kinds, rotary, rotary_scales
from megappo.megatron.rotary import PackedRotary
from tests.support.models import write_model

POSITIONS = torch.tensor([0, 1, 7, 30, 63])
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-factor": {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3, "truncate": False},
    "yarn-mscale": {"factor": 2.5, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-stretch": {"factor": None, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
}
PARTS = (None, 0.25, 0.5, 0.75, 1.0)
OWN_ROPES = ("gemma3_text",)
"""Families whose kinds of layers have separate ropes; those of Gemma 4 are in tests/plan/test_wide_attention.py."""


def given(folder: Path, name: str, part: float | None) -> Any:
    """The configuration of a folder with another rope, of all layers or of those without a window, as it is read from
    a file."""
    config: Any = AutoConfig.from_pretrained(folder)
    rope: dict[str, Any] = {"rope_type": name.partition("-")[0], "rope_theta": 500.0, **TYPES[name]}
    rope |= {} if part is None else {"partial_rotary_factor": part}
    kinds = rope_kinds(architecture(config))
    config.rope_parameters = rope if not kinds else {**config.rope_parameters, "full_attention": rope}
    config.save_pretrained(folder / "changed")
    return AutoConfig.from_pretrained(folder / "changed")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma4_text"])
def test_ropes_are_those_of_transformers_or_refused(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / "model", family, 1, num_hidden_layers=2, head_dim=8)
    compared, refused = set[str](), set[str]()
    for name, part in itertools.product(TYPES, PARTS):
        config = given(folder, name, part)
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
            words = {} if kind is None else {"layer_type": kind}
            cosine, sine = module(torch.zeros(1, len(POSITIONS), 1), POSITIONS[None], **words)
            expected = torch.stack((cosine[0], sine[0]))[:, :, None]
            if 2 * expected.shape[-1] == of_kind.shape[-1]:  # gpt-oss has each pair of channels once
                expected = torch.cat((expected, expected), dim=-1)
            torch.testing.assert_close(of_kind, expected.float(), rtol=0, atol=1e-6)
        compared.add(name)
    assert "default" in compared
    assert {"dynamic", "longrope"} <= refused
    assert family in OWN_ROPES or compared == set(TYPES) - {"dynamic", "longrope"}
