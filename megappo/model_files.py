"""A model's folder, tokenizer and architecture."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from megappo.architecture import ArchitectureConfig, architecture
from megappo.config import Config, ConfigError
from megappo.config.hub import hub_folder
from megappo.config.schema import ModelSettings


def model_folder(path: str, *, weights: bool = True) -> Path:
    """The local folder of a model; a hub name is fetched once per machine.

    Fetches configuration and tokenizer, and safetensors with `weights`. Raises ConfigError where that fails.
    """
    return Path(path) if Path(path).is_dir() else hub_folder(path, key="the model", weights=weights)


def tokenizer_folder(model: ModelSettings) -> Path:
    """The local folder of a model's tokenizer. Raises ConfigError where there is none."""
    if model.tokenizer is None:
        return model_folder(model.path, weights=False)
    own = Path(model.tokenizer)
    return own if own.is_dir() else hub_folder(model.tokenizer, key="model.tokenizer")


def load_tokenizer(model: ModelSettings) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Raises ConfigError where there is none."""
    place = tokenizer_folder(model)
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:  # by what is missing or wrong in the folder
        key = "model.tokenizer" if model.tokenizer else "model.path"
        raise ConfigError(
            f"{key} '{place}' holds no tokenizer that can be loaded ({str(error).strip().splitlines()[0]}); set "
            "model.tokenizer to the folder or hub name of one"
        ) from error


def load_architecture(folder: Path, trust_remote_code: bool) -> ArchitectureConfig:
    """The architecture of a model folder."""
    return architecture(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code))


def model_paths(config: Config) -> dict[str, str]:
    """The folder or hub name of each role's model, by role; a role without one of its own has the actor's."""
    paths = {"actor": config.model.path}
    if config.critic is not None and config.critic.path is not None:
        paths["critic"] = config.critic.path
    if config.reference is not None and config.reference.path is not None:
        paths["reference"] = config.reference.path
    return paths
