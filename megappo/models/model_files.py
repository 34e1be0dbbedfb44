"""Reads the folders, tokenizers and architectures of a run's models before anything is built."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megappo.errors import ConfigError, either, link_to_nothing, reason, show
from megappo.families import FAMILIES, architecture
from megappo.families.declaration import ArchitectureConfig, Family
from megappo.families.rope import check_rope_numbers
from megappo.files.folder_texts import read_object
from megappo.files.json_values import JSONValue
from megappo.files.plain_files import check_folder
from megappo.models.hub import hub_folder, may_be_hub_name
from megappo.models.tokens import TokenRows

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def read_architecture(
    path: str | Path,
    families: Mapping[str, Family] = FAMILIES,
    *,
    trust_remote_code: bool = False,
    key: str = "model.path",
) -> ArchitectureConfig:
    """Return the architecture of a model. Relative folders are relative to the working directory.

    Args:
        path: folder or hub name.
        families: supported model families by `model_type`.
        trust_remote_code: whether code in the model's folder may run.
        key: setting that errors name.

    Raises ConfigError for a folder without a readable config.json, a hub name that cannot be downloaded, and an
    unsupported model.
    """
    folder = Path(path)
    if not folder.is_dir():
        _refuse_no_model(str(path), key)
        folder = hub_folder(str(path), key=key)
    content = read_config_json(folder, key=key)
    model_type = content.get("model_type")
    if not isinstance(model_type, str | None):
        raise ConfigError(f"{key}: model_type in {folder / 'config.json'} is {show(model_type)}, must be text; fix it")
    is_inner = bool(model_type) and any(family.within == model_type for family in families.values())
    if model_type not in families and not is_inner:  # before the import of transformers, which raises a different error
        wrong = f"model_type '{model_type}' is not supported" if model_type else "its config.json has no model_type"
        text, remedy = f"{model_type}_text", f"use a model of {either(families)}"
        if text in families:
            remedy = f"save its language model, a {text}, with transformers' AutoModelForCausalLM, and use that"
        raise ConfigError(f"{key} '{folder}': {wrong}; {remedy}")
    try:
        check_rope_numbers(content)  # errors of transformers do not name the field
    except ValueError as error:
        raise ConfigError(f"{key} '{path}': {error}") from error
    hf_config = _hf_config(folder, trust_remote_code, key)
    try:
        return architecture(hf_config.text_config if is_inner else hf_config, families)
    except ValueError as error:
        raise ConfigError(f"{key} '{path}': {error}") from error


def _refuse_no_model(path: str, key: str) -> None:
    """Raise ConfigError for a path that is neither a folder nor a hub name, without a request to the hub."""
    if link := link_to_nothing(Path(path)):
        raise ConfigError(f"{key}: {link}")
    if Path(path).exists():
        raise ConfigError(f"{key} '{path}' is a file; give the folder that holds config.json")
    if not may_be_hub_name(path):
        raise ConfigError(
            f"{key} '{path}': there is no such folder (from {Path.cwd()}); "
            "give a folder with config.json, or a hub name such as Qwen/Qwen2.5-0.5B"
        )


def read_config_json(folder: Path, *, key: str = "model.path") -> dict[str, Any]:
    """Return the content of a model's config.json. Raises ConfigError if the file cannot be read."""
    path = folder / "config.json"
    if link := link_to_nothing(path):
        raise ConfigError(f"{key}: {link}")
    if not path.exists():
        raise ConfigError(f"{key} '{folder}' {_no_model(folder)}")
    try:
        check_folder(folder)
        return read_object(path)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _no_model(folder: Path) -> str:
    """Return the problem of a folder without config.json, and the remedy. The folder of a run has its model inside."""
    if not (folder / "config.yaml").exists():
        return "has no config.json; give a Hugging Face model folder"
    final = folder / "final"
    remedy = f"give {final}" if (final / "config.json").exists() else f"`megappo export {folder} OUT` writes its model"
    return f"is the directory of a run and has no config.json; {remedy}"


def _hf_config(folder: Path, trust_remote_code: bool, key: str) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        if trust_remote_code:  # the result depends on code in other files of the folder, so it is not cached
            hf_config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=True)
            return hf_config
        return copy.deepcopy(_plain_config(folder, (folder / "config.json").read_bytes()))
    except Exception as error:
        raise ConfigError(f"{key} '{folder}': its config.json is refused: {reason(error)}") from error


@functools.lru_cache(maxsize=16)
def _plain_config(folder: Path, _content: bytes) -> PretrainedConfig:
    """Return the configuration that transformers reads, cached by content. Reading takes 0.1 s, and each rank needs it
    nine times."""
    from transformers import AutoConfig

    hf_config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    return hf_config


def model_folder(path: str, *, weights: bool = True, key: str = "the model") -> Path:
    """Return the local folder of a model. A hub name is downloaded once per machine.

    Args:
        path: folder or hub name.
        weights: whether to download safetensors in addition to configuration and tokenizer.
        key: setting that errors name.

    Raises ConfigError if the download fails.
    """
    return Path(path) if Path(path).is_dir() else hub_folder(path, key=key, weights=weights)


def resolve_stop_token_ids(
    folder: Path, tokenizer: PreTrainedTokenizerBase, extra: Sequence[int], rows: TokenRows | None = None
) -> tuple[int, ...]:
    """Return the tokens that end a response.

    The tokens come from `extra`, from the tokenizer, and from config.json and generation_config.json, which servers
    also use.

    Raises ConfigError for a token outside of `rows`, because it can never be sampled.
    """
    sources = {"rollout.stop_token_ids has": list(extra)}
    if (folder / "config.json").exists():
        sources[f"eos_token_id in {folder / 'config.json'} has"] = _ends_in(folder)
    if tokenizer.eos_token_id is not None:
        sources["the tokenizer's eos_token is"] = [int(tokenizer.eos_token_id)]
    generation = folder / "generation_config.json"
    if generation.exists():
        sources[f"eos_token_id in {generation} has"] = _listed(read_object(generation).get("eos_token_id"), generation)
    for place, ids in sources.items():
        if rows is not None and (problem := rows.problem(ids)):
            raise ConfigError(f"{place} {problem}, so that it never ends a response; change it, or use another model")
    return tuple(sorted({token for ids in sources.values() for token in ids}))


def _ends_in(folder: Path) -> list[int]:
    """Return `eos_token_id` of a config.json. A multimodal model has it in the section of its language model."""
    content = read_config_json(folder)
    inner, eos = content.get("text_config"), content.get("eos_token_id")
    if eos is None and isinstance(inner, dict):
        eos = inner.get("eos_token_id")
    return _listed(eos, folder / "config.json")


def _listed(eos: JSONValue, path: Path) -> list[int]:
    """Return an `eos_token_id` as a list. Raises ConfigError if it is neither a token nor a list of tokens."""
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    tokens = [token for token in ids if type(token) is int]
    if len(tokens) < len(ids):
        raise ConfigError(f"eos_token_id in {path} is {show(eos)}, must be a token or a list of tokens; fix it")
    return tokens
