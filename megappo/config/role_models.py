"""Reads the folders, tokenizers and architectures of a run's models, as its settings name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.config.schema import Config, ModelSettings
from megappo.errors import ConfigError, link_to_nothing, reason
from megappo.families import FAMILIES
from megappo.families.declaration import ArchitectureConfig, Family
from megappo.files.folder_texts import OF_TOKENIZERS, check_texts
from megappo.models.chat_template import set_template
from megappo.models.hub import hub_folder
from megappo.models.model_files import model_folder, read_architecture
from megappo.models.tokens import TokenRows
from megappo.models.vocabulary import check_same_tokens
from megappo.plugins import load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_architecture(path: str | Path, model: ModelSettings, *, key: str = "model.path") -> ArchitectureConfig:
    """Call `read_architecture` with a run's settings, including its custom family and code from the model's folder."""
    families = FAMILIES
    if model.family is not None:
        own: Family = load(model.family, "model.family", lambda family: isinstance(family, Family), "family")
        families = {**families, own.model_type: own}
    return read_architecture(path, families, trust_remote_code=model.trust_remote_code, key=key)


def load_architectures(config: Config, place: Callable[[str], str] = str) -> dict[str, ArchitectureConfig]:
    """Return the architecture of each model in `model_paths`. `place` maps a path to the path to read."""
    return {
        role: load_architecture(place(path), config.model, key=_key_of(role))
        for role, path in model_paths(config).items()
    }


def role_folder(config: Config, role: str, *, weights: bool = True) -> Path:
    """Return `model_folder` of a role. A role without a separate model has the actor's."""
    return model_folder(model_paths(config).get(role, config.model.path), weights=weights)


def tokenizer_folder(model: ModelSettings) -> Path:
    """Return the local folder of a model's tokenizer. Raises ConfigError if the download fails."""
    if model.tokenizer is None:
        return model_folder(model.path, weights=False)
    own = Path(model.tokenizer)
    return own if own.is_dir() else hub_folder(model.tokenizer, key="model.tokenizer")


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a run with its chat template. Raises ConfigError if one of the two cannot be loaded."""
    from transformers import AutoTokenizer

    model = config.model
    place, key = tokenizer_folder(model), "model.tokenizer" if model.tokenizer else "model.path"
    try:
        check_texts(place, OF_TOKENIZERS)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # transformers and the code in the folder may raise any exception
        if link := next(filter(None, (link_to_nothing(place / name) for name in OF_TOKENIZERS)), ""):
            raise ConfigError(f"{key}: {link}") from error
        raise ConfigError(
            f"{key} '{place}' holds no tokenizer that can be loaded ({reason(error)}); set "
            "model.tokenizer to the folder or hub name of a tokenizer"
        ) from error
    set_template(tokenizer, config.data.chat_template, config.data.chat_template_options)
    return tokenizer


def token_rows(config: Config, tokenizer: PreTrainedTokenizerBase, *, training: bool = True) -> TokenRows:
    """Return the rows of the smallest embedding among a run's models, because all roles read the same tokens.

    Without `training`, only the actor counts.

    Raises the errors of `load_architectures`, and ConfigError in two cases: a role has no row for a token that the
    actor may sample (a token of the tokenizer with a row in the actor), or a role's folder numbers tokens differently.
    """
    paths = model_paths(config)
    sizes = {
        role: load_architecture(path, config.model, key=_key_of(role)).vocab_size
        for role, path in paths.items()
        if training or role == "actor"
    }
    sampled = min(sizes["actor"], max(tokenizer.get_vocab().values(), default=-1) + 1)
    for role, size in sizes.items():
        if size < sampled:
            raise ConfigError(
                f"{_key_of(role)} '{paths[role]}' has rows for {size} tokens (its vocab_size), but the actor samples "
                f"from {sampled}; use a {role} with the actor's vocabulary"
            )
    for role in sizes:
        require_same_tokens(config, tokenizer, role_folder(config, role, weights=False), _key_of(role))
    smallest = min(sizes, key=sizes.__getitem__)
    return TokenRows(sizes[smallest], paths[smallest])


def require_same_tokens(config: Config, tokenizer: PreTrainedTokenizerBase, folder: Path, key: str) -> None:
    """Call `check_same_tokens` for the run's tokenizer and another folder, which the setting `key` names."""
    own, trusts = tokenizer_folder(config.model), config.model.trust_remote_code
    check_same_tokens(tokenizer, own, folder, key, trust_remote_code=trusts)


def model_paths(config: Config) -> dict[str, str]:
    """Return the folder or hub name of each model by role. Roles without a separate model are missing."""
    roles = {"actor": config.model, "critic": config.critic, "reference": config.reference}
    return {role: of.path for role, of in roles.items() if of is not None and of.path is not None}


def _key_of(role: str) -> str:
    return "model.path" if role == "actor" else f"{role}.path"
