"""Software versions of a checkpoint, and compatible versions of torch."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

import torch

from megappo import __version__
from megappo.checkpoint.files import Marker
from megappo.config.sections.engine import SERVER_PACKAGES
from megappo.runtime.packages import installed_version, packages_digest

_PACKAGES = ("torch", "megatron-core", "transformers", "numpy", "triton", *SERVER_PACKAGES, "transformer-engine")
PACKAGES = "installed packages"
"""Key for the digest of all installed packages in a checkpoint. Checkpoints of older versions have no digest."""
TORCH_VERSIONS = ((2, 11), (2, 14))
"""First and last version of torch with compatible checkpoints, as tested. requirements.txt allows the same range."""


_installed_version = functools.cache(installed_version)
"""Cached version of a package. A lookup takes milliseconds, and the version does not change in a process."""


def software_versions() -> dict[str, str]:
    """Return the versions of all software with an effect on results."""
    versions = {package: _installed_version(package) for package in _PACKAGES}
    own = {"megappo": __version__, "python": platform.python_version()}
    return own | {package: version for package, version in versions.items() if version is not None}


def recorded_versions() -> dict[str, str]:
    """Return the software versions and a digest of all installed packages, for a checkpoint."""
    return software_versions() | {PACKAGES: packages_digest()}


def require_readable(folder: Path, marker: Marker) -> None:
    """Check that the torch version of a checkpoint is compatible. Raises ValueError if the version was not tested."""
    written, own = str(marker.content["versions"]["torch"]), str(torch.__version__)
    first, last = TORCH_VERSIONS
    if _release(written) == _release(own) or all(first <= _release(v) <= last for v in (written, own)):
        return
    raise ValueError(
        f"{folder} was written with torch {written}, this is torch {own}; checkpoints are compatible from torch "
        f"{_text(first)} to {_text(last)}: continue with torch {written}, or start a new run"
    )


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor number, or an empty tuple for other versions."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
