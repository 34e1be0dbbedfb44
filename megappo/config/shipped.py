"""Paths of non-Python files that megappo ships: configurations, models' config.json and launchers."""

from __future__ import annotations

from pathlib import Path


def shipped_file(*parts: str) -> Path:
    """Return the path of a shipped file or folder. Installed packages contain it, and clones have it next to the
    package."""
    package = Path(__file__).parents[1]
    installed = package.joinpath("shipped", *parts)
    return installed if installed.exists() else package.parent.joinpath(*parts)
