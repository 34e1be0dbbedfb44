"""A model's folder, tokenizer and architecture."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from megappo.architecture import ArchitectureConfig, architecture
from megappo.config import Config, ConfigError
from megappo.config.schema import ModelSettings

_TEXTS = ("*.json", "*.model", "*.jinja", "*.txt")


def model_folder(path: str, *, weights: bool = True) -> Path:
    """The local folder of a model; a hub name is fetched once per machine.

    Fetches configuration and tokenizer, and safetensors with `weights`. Raises ConfigError where that fails.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(path, allow_patterns=[*_TEXTS, *(("*.safetensors",) if weights else ())]))
    except (OSError, HfHubHTTPError) as error:
        raise ConfigError(
            f"the model '{path}' is neither a folder (from {Path.cwd()}) nor could it be fetched from the hub "
            f"({str(error).strip().splitlines()[0]}); check name and network, or download it and give its folder"
        ) from error


def load_tokenizer(model: ModelSettings) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Raises ConfigError where there is none."""
    place = model.tokenizer or str(model_folder(model.path, weights=False))
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
