"""Where files are that megappo ships beside its Python code: configurations, models' config.json, launchers."""

from __future__ import annotations

from pathlib import Path


def shipped_file(*parts: str) -> Path:
    """A file or folder that stands beside the package in a clone, and in it where pip installed it."""
    package = Path(__file__).parents[1]
    installed = package.joinpath("shipped", *parts)
    return installed if installed.exists() else package.parent.joinpath(*parts)
