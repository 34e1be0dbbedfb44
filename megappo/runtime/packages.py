"""Installed packages."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import sys
from collections import defaultdict
from pathlib import Path


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
