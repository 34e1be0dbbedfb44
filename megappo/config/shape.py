"""The sizes of a model, read from its Hugging Face configuration before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.architecture import ArchitectureConfig, architecture
from megappo.config.errors import ConfigError, either
from megappo.config.hub import hub_folder
from megappo.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def model_shape(path: str, trust_remote_code: bool = False, *, key: str = "model.path") -> ArchitectureConfig:
    """Read the architecture of the model at a folder (relative to the working directory) or hub name.

    `key` names the setting in errors. Raises ConfigError for a folder without a readable config.json, a hub name that
    cannot be fetched and a model that is not supported.
    """
    _check_folder(path, key)
    folder = path
    if not Path(path).is_dir():
        folder = str(hub_folder(path, key=key))
        _check_model_type(Path(folder), key)
    hf_config = _hf_config(folder, trust_remote_code, key)
    try:
        model = architecture(hf_config)
    except ValueError as error:
        raise ConfigError(f"{key} '{path}': {error}") from error
    if model.kv_heads < 1 or model.heads % model.kv_heads:
        raise ConfigError(
            f"{key} '{path}': num_attention_heads {model.heads} is not a multiple of num_key_value_heads "
            f"{model.kv_heads}; mend its config.json (without num_key_value_heads the family's default holds)"
        )
    return model


def _check_folder(path: str, key: str) -> None:
    """Refuse what is certainly no model before transformers is imported and the hub is asked."""
    folder = Path(path)
    if folder.is_dir():
        _check_model_type(folder, key)
    elif folder.exists():
        raise ConfigError(f"{key} '{path}' is a file; give the folder that holds config.json")
    elif path.startswith((".", "/", "~")) or path.count("/") != 1 or folder.parent.is_dir():
        raise ConfigError(
            f"{key} '{path}': there is no such folder (from {Path.cwd()}); "
            "give a folder with config.json, or a hub name such as Qwen/Qwen2.5-0.5B"
        )


def _check_model_type(folder: Path, key: str) -> None:
    supported = f"use a model of {either(FAMILIES)}"
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{key} '{folder}' has no config.json; give a Hugging Face model folder") from None
    except OSError as error:
        raise ConfigError(f"{key}: {folder / 'config.json'} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{key}: {folder / 'config.json'} is not valid JSON: {error}; mend it") from None
    model_type = content.get("model_type") if isinstance(content, dict) else None
    if model_type is None:
        raise ConfigError(f"{key}: {folder / 'config.json'} has no model_type; {supported}")
    if model_type not in FAMILIES:
        raise ConfigError(f"{key} '{folder}': model_type '{model_type}' is not supported; {supported}")


def _hf_config(path: str, trust_remote_code: bool, key: str) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        hf_config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(f"{key} '{path}': its config.json is refused: {error}") from error
    return hf_config
