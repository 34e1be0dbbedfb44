"""Installed packages."""

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
"""What transformers imports for images and boxes in them, where it is installed."""
_ASKING = "transformers.utils.import_utils"


def installed_version(name: str) -> str | None:
    """The version of an installed package, None where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages_digest() -> str:
    """Names and versions of all installed packages in 12 digits, by the names of their folders."""
    folders = {folder.name for place in sys.path for folder in Path(place).glob("*.dist-info")}
    return hashlib.sha256("\n".join(sorted(folders)).encode()).hexdigest()[:12]


def quicken_packages_scan() -> None:
    """Have this process find out which packages belong to which distribution in a tenth of a second.

    transformers asks for it when it is imported (utils/import_utils.py:51), and the standard library looks for every
    file of every package: a CPU second of each process.
    """
    importlib.metadata.packages_distributions = packages_distributions


def read_texts_only() -> None:
    """Have transformers leave out in this process what it has for images: a quarter of a CPU second of its import, as
    torchvision imports torch's compiler. Whoever imports torchvision or scipy has them all the same.
    """
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        is_left_out = name in _OF_IMAGES and sys._getframe(1).f_globals.get("__name__") == _ASKING
        return None if is_left_out else find_spec(name, package)

    importlib.util.find_spec = find


def packages_distributions() -> dict[str, list[str]]:
    """As `importlib.metadata.packages_distributions`, by what distributions say that they hold, there or not."""
    found = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        declared, name = (distribution.read_text("top_level.txt") or "").split(), distribution.metadata["Name"]
        for package in declared or _recorded_packages(distribution):
            found[package].append(name)
    return dict(found)


def _recorded_packages(distribution: importlib.metadata.Distribution) -> set[str]:
    """Packages and modules at the top of what a distribution lists."""
    record = distribution.read_text("RECORD")
    paths = [str(p) for p in distribution.files or ()] if record is None else record.splitlines()
    firsts = {path.partition(",")[0].partition("/")[::2] for path in paths}
    names = {first if rest else inspect.getmodulename(first) for first, rest in firsts}
    return {name for name in names if name and "." not in name}
