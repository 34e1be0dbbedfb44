"""Folders in which compilers keep kernels: on the node's own disk by default.

A home folder is often on a slow shared file system with a quota, and all ranks of a job compile at the same time. On a
node without a writable home folder, the compilers would fail.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

_FOLDER = "MEGAPPO_COMPILE_CACHE"
"""Variable with the folder of all compile caches."""
_RANK_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
_SERVER_CACHES = {"SGLANG_CACHE_DIR": "sglang"}
_OTHER_NAMES = {"TRITON_CACHE_DIR": "TRITON_HOME"}
"""Variables that move a cache as well."""


def rank_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of Triton, Inductor and FlashInfer that `environment` lacks, with their folders."""
    return _missing(environment, _RANK_CACHES)


def server_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of SGLang and of `rank_caches` that `environment` lacks, with their folders."""
    return _missing(environment, _RANK_CACHES | _SERVER_CACHES)


def _missing(environment: Mapping[str, str], caches: Mapping[str, str]) -> dict[str, str]:
    folder = _own_folder(environment)
    if folder is None:
        return {}
    is_set = {name for name in caches if environment.get(name) or environment.get(_OTHER_NAMES.get(name, ""))}
    return {name: str(folder / part) for name, part in caches.items() if name not in is_set}


def _own_folder(environment: Mapping[str, str]) -> Path | None:
    """Returns the folder of the caches, which only this user can change, because its files are executed. Returns None
    if the folder cannot be created, or if another user can change it. The compilers then use their own defaults."""
    named = environment.get(_FOLDER)
    folder = Path(named) if named else Path(tempfile.gettempdir(), f"megappo-caches-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat() if not named else folder.stat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if is_own and os.access(folder, os.W_OK) else None
