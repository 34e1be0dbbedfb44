"""Cache folders of compilers, by default on the local disk of the node.

A home folder is often on a slow shared file system with a quota, and all ranks of a job compile at the same time.
Compilers fail on a node without a writable home folder.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megappo.errors import ConfigError

_FOLDER = "MEGAPPO_COMPILE_CACHE"
"""Environment variable with the common folder of all compile caches."""
_RANK_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def rank_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of Triton, Inductor and FlashInfer that `environment` does not set, with their folders.

    Raises ConfigError if `MEGAPPO_COMPILE_CACHE` names a folder that cannot be used.
    """
    return _missing(environment, _RANK_CACHES)


def server_caches(environment: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `rank_caches` and of the program of a server, with their folders. `own`: names of the
    program's folders by variable."""
    return _missing(environment, {**_RANK_CACHES, **own})


def _missing(environment: Mapping[str, str], caches: Mapping[str, str]) -> dict[str, str]:
    named = environment.get(_FOLDER)
    folder = Path(named) if named else Path(tempfile.gettempdir(), f"megappo-caches-{os.getuid()}")
    if not _is_own(folder, follow_links=bool(named)):
        if named:
            raise ConfigError(f"{_FOLDER} is '{named}', must be a folder that only you can write to; change it")
        return {}  # the compilers use their own defaults
    has_home = "TRITON_HOME" in environment  # this variable moves the cache of Triton
    is_set = {name for name in caches if environment.get(name)} | ({"TRITON_CACHE_DIR"} if has_home else set())
    return {name: str(folder / part) for name, part in caches.items() if name not in is_set}


def _is_own(folder: Path, *, follow_links: bool) -> bool:
    """Return whether only this user can change the folder, because compilers execute files from it. Creates the folder
    if necessary."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.stat(folder, follow_symlinks=follow_links)
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return is_own and os.access(folder, os.W_OK)
