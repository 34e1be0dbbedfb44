"""Installed packages, and faster imports of them."""

from __future__ import annotations

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

_OF_IMAGES = ("torchvision", "scipy")
"""Packages that transformers imports for images where they are installed."""
_hidden: set[str] = set()
"""Packages that transformers does not find in this process."""
_NAME = re.compile(r"^Name: *(.*\S)", re.MULTILINE)
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


def read_texts_only(*, builds_models: bool = True) -> None:
    """Make transformers skip its imports for images in this process. They take a quarter of a CPU second, as
    torchvision imports torch's compiler. Other importers of torchvision or scipy still get them.

    Without `builds_models` it skips torch too: from 5 on, reading a config.json imports transformers' generation and
    with it torch's compiler, in four CPU seconds, and of all that uses the name of a dtype. It then has configurations
    and tokenizers, and no models, until the process ends. For a process that calls `show_torch` before it has imported
    transformers, nothing is skipped but images.
    """
    find_spec = importlib.util.find_spec
    if not builds_models:
        _hidden.add("torch")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        is_left_out = name in _hidden and sys._getframe(1).f_globals.get("__name__") == _ASKING
        return None if is_left_out else find_spec(name, package)

    _hidden.update(_OF_IMAGES)
    importlib.util.find_spec = find


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
