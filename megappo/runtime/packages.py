"""Installed packages, and faster imports of them."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
from collections import defaultdict
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_OF_IMAGES = ("torchvision", "scipy")
"""Packages that transformers imports for images if they are installed."""
_hidden: set[str] = set()
"""Packages that are hidden from transformers in this process."""
_NAME = re.compile(r"^Name: *(.*\S)", re.MULTILINE)
_CALLER, _LISTING = "transformers.utils.import_utils", "create_import_structure_from_path"


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None if the package is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages_digest() -> str:
    """Return a digest of 12 digits of the names and versions of all installed packages."""
    folders = {folder.name for place in sys.path for folder in Path(place).glob("*.dist-info")}
    return hashlib.sha256("\n".join(sorted(folders)).encode()).hexdigest()[:12]


def quicken_transformers(*, builds_models: bool = True) -> None:
    """Make imports of transformers in this process faster, by 1.5 CPU seconds. For processes that handle texts. Must be
    called before transformers is imported.

    - transformers calls `importlib.metadata.packages_distributions` on import (5.19, utils/import_utils.py:51). The
      replacement reads only the declarations of packages. The version of the standard library inspects every file of
      every package.
    - Packages for images are hidden from transformers, because torchvision imports torch's compiler. Other modules can
      still import torchvision and scipy.
    - transformers searches two thousand files for the names of models. These files are read once instead of once for
      each of two modules.

    Without `builds_models`, torch is also hidden from transformers. From version 5 on, reading a config.json imports
    the generation code of transformers and torch's compiler. This takes four CPU seconds, only to use the name of a
    dtype. Without torch, transformers can load configurations and tokenizers but no models. This lasts until the
    process ends, unless `show_torch` is called before transformers is imported.
    """
    find_spec = importlib.util.find_spec
    if not builds_models:
        _hidden.add("torch")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        caller = sys._getframe(1).f_globals
        if caller.get("__name__") != _CALLER:
            return find_spec(name, package)
        _read_folders_once(caller)
        return None if name in _hidden else find_spec(name, package)

    _hidden.update(_OF_IMAGES)
    importlib.util.find_spec = find
    importlib.metadata.packages_distributions = packages_distributions


def _read_folders_once(module: dict[str, Any]) -> None:
    """Replace transformers' function that lists the definitions of a folder by a function with an unlimited cache.

    The original cache has 128 entries for 500 folders, and treats different spellings of a folder as different folders.
    transformers defines the function before it first searches for a package, and lists models later.
    """
    listing = module.get(_LISTING)
    if listing is None or listing.__module__ == __name__:
        return
    remembered = functools.cache(inspect.unwrap(listing))

    def listed(path: str | os.PathLike[str]) -> Any:
        """List the definitions of a folder. `path`: the folder, or a file in the folder."""
        return remembered(os.path.dirname(path) if os.path.isfile(path) else os.fspath(path))

    module[_LISTING] = listed


def show_torch() -> None:
    """Make torch visible to transformers, if transformers is not imported yet. The code of a model may need torch."""
    _hidden.discard("torch")


def packages_distributions() -> dict[str, list[str]]:
    """Replace `importlib.metadata.packages_distributions`. Reads the declarations of distributions without checking
    that the files exist."""
    packages = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        declared, name = (distribution.read_text("top_level.txt") or "").split(), _name(distribution)
        for package in declared or _recorded_packages(distribution):
            packages[package].append(name)
    return dict(packages)


def _name(distribution: importlib.metadata.Distribution) -> str:
    """Return the name of a distribution, without parsing the rest of its metadata."""
    match = _NAME.search((distribution.read_text("METADATA") or "").partition("\n\n")[0])
    return distribution.metadata["Name"] if match is None else match[1]


def _recorded_packages(distribution: importlib.metadata.Distribution) -> set[str]:
    """Return the top-level packages and modules in the file list of a distribution."""
    record = distribution.read_text("RECORD")
    paths = [str(p) for p in distribution.files or ()] if record is None else record.splitlines()
    firsts = {path.partition(",")[0].partition("/")[::2] for path in paths}
    names = {first if rest else inspect.getmodulename(first) for first, rest in firsts}
    return {name for name in names if name and "." not in name}
