"""Declarations of the supported model families, one file per family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megappo.families import (
    deepseek_v3,
    gemma2,
    gemma3_text,
    gemma4_text,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
)
from megappo.families.declaration import ArchitectureConfig, Family

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MODULES = (
    llama, qwen2, qwen3, qwen3_moe, mistral, mixtral, gemma2, gemma3_text, gemma4_text, glm4_moe, deepseek_v3, gpt_oss,
    qwen3_next, qwen3_5_text, qwen3_5_moe_text,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""Families of this repository by `model_type` of config.json."""


def architecture(hf_config: PretrainedConfig, families: Mapping[str, Family] = FAMILIES) -> ArchitectureConfig:
    """Read an architecture from a Hugging Face configuration.

    Raises ValueError if `families` does not contain the `model_type`, or if the family refuses a setting.
    """
    model_type = hf_config.model_type
    if model_type not in families:
        raise ValueError(f"model_type '{model_type}' is not supported; use a model of {', '.join(families)}")
    return families[model_type].architecture(hf_config)
