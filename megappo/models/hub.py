"""Models and tokenizers of the Hugging Face hub, from the network or from the local cache.

A name is `OWNER/NAME` or `OWNER/NAME@REVISION`. The revision is a branch, a tag or a commit of the repository. The
default revision is `main`.

Compute nodes often have no network. The hub's client then retries for most of a minute and prints every attempt.
megappo therefore sends one request to test whether the hub answers. If the hub does not answer, the cache is used, or
an error names the missing files. The time limit of the request is longer if the cache lacks files
(`HF_HUB_ETAG_TIMEOUT`).
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
"""Patterns of files that contain the same weights in another format. `*` also matches slashes."""
PATIENCE_SECONDS = 3.0
"""Seconds to wait for the hub if the cache already contains the required files."""


class HubName(NamedTuple):
    """Repository on the hub and its revision."""

    repository: str
    revision: str | None
    """Branch, tag or commit. None means `main`."""

    @classmethod
    def of(cls, name: str) -> HubName:
        """Split `OWNER/NAME` or `OWNER/NAME@REVISION`."""
        repository, at, revision = name.partition("@")
        return cls(repository, revision if at else None)

    @property
    def download_command(self) -> str:
        """Command that downloads the repository into the cache."""
        command = ["hf", "download", self.repository]
        return shlex.join([*command, *(["--revision", self.revision] if self.revision else [])])


def may_be_hub_name(path: str) -> bool:
    """Return whether a path may be a hub name, `OWNER/NAME` or `OWNER/NAME@REVISION`, because no such folder exists."""
    path, revision = HubName.of(path)
    if revision == "":
        return False
    is_name = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return is_name and not Path(path).exists() and not Path(path).parent.is_dir()


def hub_folder(name: str, *, key: str = "model.path", weights: bool = False) -> Path:
    """Return the folder of a model or tokenizer of the hub. The folder is downloaded once per machine.

    Args:
        name: name on the hub.
        key: setting that errors name.
        weights: whether to download safetensors in addition to text files.

    Raises ConfigError if the hub does not have the name, or if the hub cannot be reached and the cache lacks files.
    """
    if link := link_to_nothing(Path(name)):
        raise ConfigError(f"{key}: {link}")
    repository, revision = HubName.of(name)
    if revision == "":
        raise ConfigError(f"{key} '{name}' has no revision after its @; add a branch, a tag or a commit, or remove it")
    is_path = repository.startswith((".", "/", "~")) or repository.count("/") > 1
    if is_path or ("/" in repository and Path(repository).parent.is_dir()):
        raise ConfigError(
            f"{key} '{name}': there is no such folder (from {Path.cwd()}); give a folder, or a hub name whose first "
            "part is no local folder"
        )
    from huggingface_hub import constants

    cached, missing = _in_cache(name, key, weights)
    patience = float(constants.HF_HUB_ETAG_TIMEOUT) if missing else PATIENCE_SECONDS
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else silence(constants.ENDPOINT, patience)
    if why is None:
        return _fetch(name, key, weights)
    if cached is not None and not missing:
        return cached
    raise ConfigError(
        f"{key} '{name}' is no folder (from {Path.cwd()}), the hub's cache {constants.HF_HUB_CACHE} does not hold "
        f"{missing}, and {why}; on a machine with network access, such as a login node, run "
        f"`{HubName.of(name).download_command}` with the same HF_HOME and set HF_HUB_OFFLINE=1 here, or give "
        "the folder of a copy"
    )


def http_package() -> ModuleType:
    """Return the HTTP package of the hub's client, which defines its errors: `httpx`, or `httpx2` since huggingface_hub
    2."""
    from huggingface_hub.errors import HfHubHTTPError

    return importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])


def _fetch(name: str, key: str, weights: bool) -> Path:
    try:
        return _download(name, weights)
    except (OSError, ValueError, http_package().HTTPError) as error:
        raise ConfigError(
            f"{key} '{name}' is not a folder (from {Path.cwd()}), and the download from the hub failed "
            f"({reason(error)}); check the name{' and the revision' if '@' in name else ''}, run `hf auth login` for a "
            "gated model, or give the folder of a copy"
        ) from error


@functools.cache
def _download(name: str, weights: bool) -> Path:
    """Download the snapshot once per process. A run needs it for the configuration, the tokenizer and the weights."""
    from huggingface_hub import snapshot_download

    patterns = [*_TEXTS, *(_WEIGHTS if weights else ())]
    repository, revision = HubName.of(name)
    return Path(
        snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=list(_OTHER_COPIES))
    )


def cached_folder(name: str) -> Path | None:
    """Return the snapshot of a model with its weights in the local cache of the hub, or None if it is incomplete."""
    folder, missing = _in_cache(name, "the model", True)
    return None if missing else folder


def _in_cache(name: str, key: str, weights: bool) -> tuple[Path | None, str]:
    """Return the snapshot in the local cache and a phrase for its missing part, "" if the snapshot is complete."""
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
    """Return why the hub cannot be reached, or None if the hub answers. Name resolution has no time limit, so the
    request runs in a thread."""
    from huggingface_hub.utils import get_session

    http = http_package()
    answers = [f"{endpoint} does not answer in {patience_seconds:g} seconds (increase HF_HUB_ETAG_TIMEOUT)"]

    def request() -> None:
        try:
            get_session().head(endpoint, timeout=patience_seconds)
            answers.append("")
        except http.TimeoutException:
            return
        except (http.HTTPError, http.InvalidURL, OSError, ValueError, ImportError) as error:
            answers.append(client_proxy_problem() or f"{endpoint} cannot be reached ({reason(error, 60)})")

    asking = threading.Thread(target=request, daemon=True)
    asking.start()
    asking.join(patience_seconds)
    return answers[-1] or None
