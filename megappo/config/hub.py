"""Models and tokenizers by their names on the Hugging Face hub: over the network, or from its cache on this machine.

Compute nodes often have no network, and the hub's client then tries for most of a minute and prints every try. So the
hub is asked once whether it answers; where it does not, the cache is taken, or a sentence says what is missing.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path

from megappo.config.errors import ConfigError, one_line, shortened

_TEXTS = ("*.json", "*.model", "*.jinja", "*.txt", "*.py")
_WEIGHTS = ("*.safetensors",)
_PATIENCE_SECONDS = 3.0


def hub_folder(name: str, *, key: str = "model.path", weights: bool = False) -> Path:
    """The folder of a model or tokenizer on the hub, fetched once per machine: texts, and with `weights` safetensors.

    `key` names the setting in errors. Raises ConfigError for a name that the hub does not have, and where it cannot be
    asked for what the cache lacks.
    """
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"{key} '{name}': there is no such folder (from {Path.cwd()}); give a folder or a hub name")
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _silence(constants.ENDPOINT)
    return _fetch(name, key, weights) if why is None else _from_cache(name, key, weights, why)


def _fetch(name: str, key: str, weights: bool) -> Path:
    from httpx import HTTPError
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[*_TEXTS, *(_WEIGHTS if weights else ())]))
    except (OSError, ValueError, HTTPError) as error:
        raise ConfigError(
            f"{key} '{name}' is neither a folder (from {Path.cwd()}) nor could it be fetched from the hub "
            f"({shortened(one_line(str(error)), 200)}); check the name, `hf auth login` where it is gated, or give the "
            "folder of a copy"
        ) from error


def _from_cache(name: str, key: str, weights: bool, why: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        folder: Path | None = Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        folder = None
    missing = None
    if folder is None or (key != "model.tokenizer" and not (folder / "config.json").exists()):
        missing = "it"
    elif weights and not any(folder.glob("*.safetensors")):
        missing = "its weights"
    if folder is not None and missing is None:
        return folder
    raise ConfigError(
        f"{key} '{name}' is no folder (from {Path.cwd()}), the hub's cache {constants.HF_HUB_CACHE} does not hold "
        f"{missing}, and {why}; where there is network, such as on a login node, run `hf download {name}` with the "
        "same HF_HOME and set HF_HUB_OFFLINE=1 here, or give the folder of a copy"
    )


@functools.lru_cache(maxsize=1)
def _silence(endpoint: str) -> str | None:
    """Why the hub cannot be asked; None where it answers. Looking up a name has no time limit, hence the thread."""
    from httpx import HTTPError, InvalidURL
    from huggingface_hub.utils import get_session

    said = [f"{endpoint} does not answer in {_PATIENCE_SECONDS:g} seconds"]

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=_PATIENCE_SECONDS)
            said.append("")
        except (HTTPError, InvalidURL, OSError, ValueError) as error:
            said.append(f"{endpoint} cannot be reached ({shortened(one_line(str(error)) or type(error).__name__)})")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE_SECONDS)
    return said[-1] or None
