"""Versions of the software that wrote a checkpoint, and the versions of torch between which checkpoints can be
exchanged."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

import torch

from megappo import __version__
from megappo.checkpoint.files import Marker
from megappo.runtime.packages import installed_version, packages_digest

_PACKAGES = ("torch", "megatron-core", "transformers", "numpy", "triton", "sglang", "transformer-engine")
PACKAGES = "installed packages"
"""Name under which a checkpoint holds the digest of all installed packages; those of an earlier megappo have none."""
TORCH_VERSIONS = ((2, 11), (2, 14))
"""First and last torch between which the tests load each other's checkpoints; requirements.txt allows the same
range."""


_installed_version = functools.cache(installed_version)
"""Version of a package, read once: it takes milliseconds, and a process imports a package once."""


def software_versions() -> dict[str, str]:
    """Versions of all software that computes."""
    found = {package: _installed_version(package) for package in _PACKAGES}
    own = {"megappo": __version__, "python": platform.python_version()}
    return own | {package: version for package, version in found.items() if version is not None}


def recorded_versions() -> dict[str, str]:
    """The software versions and a digest of all installed packages, for a checkpoint."""
    return software_versions() | {PACKAGES: packages_digest()}


def require_readable(folder: Path, marker: Marker) -> None:
    """Raise ValueError for a checkpoint of a torch whose checkpoints were never loaded with this one."""
    written, here = str(marker.content["versions"]["torch"]), str(torch.__version__)
    first, last = TORCH_VERSIONS
    if _release(written) == _release(here) or all(first <= _release(v) <= last for v in (written, here)):
        return
    raise ValueError(
        f"{folder} was written with torch {written}, this is torch {here}; checkpoints go from one version to another "
        f"between torch {_text(first)} and {_text(last)}: continue with torch {written}, or begin a new run"
    )


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number; empty where the version has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
