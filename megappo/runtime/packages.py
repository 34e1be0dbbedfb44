"""Installed packages."""

from __future__ import annotations

import importlib.metadata


def installed_version(name: str) -> str | None:
    """The version of an installed package, None where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
