"""Models and tokenizers by their names on the Hugging Face hub: over the network, or from its cache on this machine.

A name is `OWNER/NAME`, or `OWNER/NAME@REVISION` with a branch, a tag or a commit of the repository; without one it is
what the hub calls `main`.

Compute nodes often have no network, and the hub's client then retries for most of a minute and prints every try. So the
hub is asked once whether it answers; where it does not, the cache is used, or a sentence says what is missing. For
files that the cache lacks the wait is longer, as `HF_HUB_ETAG_TIMEOUT` says.
"""

from __future__ import annotations

import functools
import importlib
import shlex
import threading
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from megappo.errors import ConfigError, link_to_nothing, reason
from megappo.network.proxies import client_proxy_problem

_TEXTS = ("*.json", "*.model", "*.jinja", "*.txt", "*.py")
_WEIGHTS = ("*.safetensors",)
_OTHER_COPIES = ("*/*.safetensors", "consolidated*.safetensors")
"""Patterns of files that hold the weights again in another format; a pattern's `*` crosses slashes."""
PATIENCE_SECONDS = 3.0
"""Seconds to wait for the hub where the cache already holds what is needed."""


class HubName(NamedTuple):
    """A repository on the hub, and which of its revisions."""

    repository: str
    revision: str | None
    """A branch, a tag or a commit; None: `main`."""

    @classmethod
    def of(cls, name: str) -> HubName:
        """The parts of `OWNER/NAME` or `OWNER/NAME@REVISION`."""
        repository, at, revision = name.partition("@")
        return cls(repository, revision if at else None)

    @property
    def download_command(self) -> str:
        """The command that brings it into the cache."""
        words = ["hf", "download", self.repository]
        return shlex.join([*words, *(["--revision", self.revision] if self.revision else [])])


def may_be_hub_name(path: str) -> bool:
    """Whether a path that is no folder may be a model's name on the hub, `OWNER/NAME` or `OWNER/NAME@REVISION`."""
    path, revision = HubName.of(path)
    if revision == "":
        return False
    is_name = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return is_name and not Path(path).exists() and not Path(path).parent.is_dir()


def hub_folder(name: str, *, key: str = "model.path", weights: bool = False) -> Path:
    """The folder of a model or tokenizer on the hub, fetched once per machine: texts, and with `weights` safetensors.

    `key` names the setting in errors. Raises ConfigError for a name that the hub does not have, and where it cannot be
    asked for what the cache lacks.
    """
    if link := link_to_nothing(Path(name)):
        raise ConfigError(f"{key}: {link}")
    repository, revision = HubName.of(name)
    if revision == "":
        raise ConfigError(f"{key} '{name}' has no revision behind its @; add a branch, a tag or a commit, or remove it")
    is_path = repository.startswith((".", "/", "~")) or repository.count("/") > 1
    if is_path or ("/" in repository and Path(repository).parent.is_dir()):
        raise ConfigError(
            f"{key} '{name}': there is no such folder (from {Path.cwd()}); give a folder, or a hub name whose first "
            "part is no folder here"
        )
    from huggingface_hub import constants

    kept, missing = _in_cache(name, key, weights)
    patience = float(constants.HF_HUB_ETAG_TIMEOUT) if missing else PATIENCE_SECONDS
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else silence(constants.ENDPOINT, patience)
    if why is None:
        return _fetch(name, key, weights)
    if kept is not None and not missing:
        return kept
    raise ConfigError(
        f"{key} '{name}' is no folder (from {Path.cwd()}), the hub's cache {constants.HF_HUB_CACHE} does not hold "
        f"{missing}, and {why}; where there is network, such as on a login node, run "
        f"`{HubName.of(name).download_command}` with the same HF_HOME and set HF_HUB_OFFLINE=1 here, or give "
        "the folder of a copy"
    )


def http_package() -> ModuleType:
    """The HTTP package of the hub's client, for the errors it raises: `httpx`, from huggingface_hub 2 on `httpx2`."""
    from huggingface_hub.errors import HfHubHTTPError

    return importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])


def _fetch(name: str, key: str, weights: bool) -> Path:
    try:
        return _download(name, weights)
    except (OSError, ValueError, http_package().HTTPError) as error:
        raise ConfigError(
            f"{key} '{name}' is neither a folder (from {Path.cwd()}) nor could it be fetched from the hub "
            f"({reason(error)}); check the name{' and the revision' if '@' in name else ''}, `hf auth login` where it "
            "is gated, or give the folder of a copy"
        ) from error


@functools.cache
def _download(name: str, weights: bool) -> Path:
    """The snapshot, asked for once per process: a run comes back for a model's configuration, tokenizer and weights."""
    from huggingface_hub import snapshot_download

    patterns = [*_TEXTS, *(_WEIGHTS if weights else ())]
    repository, revision = HubName.of(name)
    return Path(
        snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=list(_OTHER_COPIES))
    )


def cached_folder(name: str) -> Path | None:
    """The snapshot of a model with its weights in the hub's cache on this machine; None where it is not there."""
    folder, missing = _in_cache(name, "the model", True)
    return None if missing else folder


def _in_cache(name: str, key: str, weights: bool) -> tuple[Path | None, str]:
    """(the snapshot in the hub's cache on this machine, words for what it lacks; "" where it lacks nothing)."""
    from huggingface_hub import snapshot_download

    repository, revision = HubName.of(name)
    try:
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None, "it"
    if key != "model.tokenizer" and not (folder / "config.json").exists():
        return folder, "it"
    return folder, "its weights" if weights and not any(folder.glob("model*.safetensors*")) else ""


@functools.cache
def silence(endpoint: str, patience_seconds: float) -> str | None:
    """Why the hub cannot be asked; None where it answers. Looking up a name has no time limit, hence the thread."""
    from huggingface_hub.utils import get_session

    http = http_package()
    said = [f"{endpoint} does not answer in {patience_seconds:g} seconds (HF_HUB_ETAG_TIMEOUT raises that)"]

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=patience_seconds)
            said.append("")
        except http.TimeoutException:
            return
        except (http.HTTPError, http.InvalidURL, OSError, ValueError, ImportError) as error:
            said.append(client_proxy_problem() or f"{endpoint} cannot be reached ({reason(error, 60)})")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience_seconds)
    return said[-1] or None
