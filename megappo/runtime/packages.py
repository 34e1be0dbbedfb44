"""Installed packages, and faster imports of them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections import defaultdict
from importlib.machinery import ModuleSpec
from pathlib import Path

_OF_IMAGES = ("torchvision", "scipy")
"""Packages that transformers imports for images where they are installed."""
_ASKING = "transformers.utils.import_utils"


def installed_version(name: str) -> str | None:
    """Version of an installed package, None where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages_digest() -> str:
    """Names and versions of all installed packages in 12 digits, by the names of their folders."""
    folders = {folder.name for place in sys.path for folder in Path(place).glob("*.dist-info")}
    return hashlib.sha256("\n".join(sorted(folders)).encode()).hexdigest()[:12]


def quicken_packages_scan() -> None:
    """Make `importlib.metadata.packages_distributions` fast in this process: a tenth of a second.

    transformers calls it on import (5.19, utils/import_utils.py:51), and the standard library's version inspects every
    file of every package: a CPU second in each process.
    """
    importlib.metadata.packages_distributions = packages_distributions


def read_texts_only() -> None:
    """Make transformers skip its imports for images in this process. They take a quarter of a CPU second, as
    torchvision imports torch's compiler. Other importers of torchvision or scipy still get them."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        is_left_out = name in _OF_IMAGES and sys._getframe(1).f_globals.get("__name__") == _ASKING
        return None if is_left_out else find_spec(name, package)

    importlib.util.find_spec = find


def packages_distributions() -> dict[str, list[str]]:
    """Replaces `importlib.metadata.packages_distributions`: reads what distributions declare, whether the files exist
    or not."""
    found = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        declared, name = (distribution.read_text("top_level.txt") or "").split(), distribution.metadata["Name"]
        for package in declared or _recorded_packages(distribution):
            found[package].append(name)
    return dict(found)


def _recorded_packages(distribution: importlib.metadata.Distribution) -> set[str]:
    """Top-level packages and modules in a distribution's list of files."""
    record = distribution.read_text("RECORD")
    paths = [str(p) for p in distribution.files or ()] if record is None else record.splitlines()
    firsts = {path.partition(",")[0].partition("/")[::2] for path in paths}
    names = {first if rest else inspect.getmodulename(first) for first, rest in firsts}
    return {name for name in names if name and "." not in name}
