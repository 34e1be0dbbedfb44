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
"""Packages that transformers imports for images where they are installed."""
_hidden: set[str] = set()
"""Packages that transformers does not find in this process."""
_NAME = re.compile(r"^Name: *(.*\S)", re.MULTILINE)
_ASKING, _LISTING = "transformers.utils.import_utils", "create_import_structure_from_path"


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


def quicken_transformers(*, builds_models: bool = True) -> None:
    """Make imports of transformers in this process faster, by one and a half CPU seconds; for a process that handles
    texts and calls this before it imports transformers.

    - `importlib.metadata.packages_distributions`, which transformers calls on import (5.19, utils/import_utils.py:51),
      reads what packages declare: the standard library's version inspects every file of every package.
    - What transformers imports for images is not found: torchvision imports torch's compiler. Other importers of
      torchvision or scipy still get them.
    - The two thousand files in which transformers looks for names of models are read once, not once for each of the two
      modules that list them.

    Without `builds_models` transformers does not find torch either: from 5 on, reading a config.json imports
    transformers' generation and with it torch's compiler, in four CPU seconds, and of all that uses the name of a
    dtype. It then has configurations and tokenizers, and no models, until the process ends; it has all where
    `show_torch` is called before it is imported.
    """
    find_spec = importlib.util.find_spec
    if not builds_models:
        _hidden.add("torch")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        asking = sys._getframe(1).f_globals
        if asking.get("__name__") != _ASKING:
            return find_spec(name, package)
        _read_folders_once(asking)
        return None if name in _hidden else find_spec(name, package)

    _hidden.update(_OF_IMAGES)
    importlib.util.find_spec = find
    importlib.metadata.packages_distributions = packages_distributions


def _read_folders_once(module: dict[str, Any]) -> None:
    """Replace transformers' function that lists what a folder defines by one that remembers it: its own memory has 128
    places for 500 folders, and knows a folder by one of its spellings. The function is there when transformers asks for
    the first package after it has imported the module, before it lists models."""
    listing = module.get(_LISTING)
    if listing is None or listing.__module__ == __name__:
        return
    remembered = functools.cache(inspect.unwrap(listing))

    def listed(path: str | os.PathLike[str]) -> Any:
        """`path`: a folder, or a file in it."""
        return remembered(os.path.dirname(path) if os.path.isfile(path) else os.fspath(path))

    module[_LISTING] = listed


def show_torch() -> None:
    """Let transformers have torch, where it has not been imported yet: a model's own code may want it."""
    _hidden.discard("torch")


def packages_distributions() -> dict[str, list[str]]:
    """Replaces `importlib.metadata.packages_distributions`: reads what distributions declare, whether the files exist
    or not."""
    found = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        declared, name = (distribution.read_text("top_level.txt") or "").split(), _name(distribution)
        for package in declared or _recorded_packages(distribution):
            found[package].append(name)
    return dict(found)


def _name(distribution: importlib.metadata.Distribution) -> str:
    """The distribution's name, without parsing all that the file says beside."""
    found = _NAME.search((distribution.read_text("METADATA") or "").partition("\n\n")[0])
    return distribution.metadata["Name"] if found is None else found[1]


def _recorded_packages(distribution: importlib.metadata.Distribution) -> set[str]:
    """Top-level packages and modules in a distribution's list of files."""
    record = distribution.read_text("RECORD")
    paths = [str(p) for p in distribution.files or ()] if record is None else record.splitlines()
    firsts = {path.partition(",")[0].partition("/")[::2] for path in paths}
    names = {first if rest else inspect.getmodulename(first) for first, rest in firsts}
    return {name for name in names if name and "." not in name}
