"""Paths as users write them: a leading `~` becomes the home folder, and a variable is refused.

A shell replaces both on its command line; in a file, or after the `=` of an override, nobody does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megappo.errors import ConfigError, show

_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\}?|\([^)]*\)?)")
_PATH_IN_TEXT = re.compile(rf"(?:^|(?<=[/:])){_VARIABLE.pattern}")


def expanded(path: str | os.PathLike[str], setting: str = "") -> str:
    """The path with the home folder in place of a leading `~` or `~user`.

    `setting` begins the sentence of an error. Raises ConfigError for a variable such as `$HOME` in it, and for a user
    that this machine does not have.
    """
    text, place = os.fspath(path), f"{setting}: " if setting else ""
    if variable := _VARIABLE.search(text):
        raise ConfigError(place + _variable_refused(text, variable[0]))
    home = os.path.expanduser(text)
    if text.startswith("~") and home == text:
        user = text.partition("/")[0]
        raise ConfigError(
            f"{place}{show(text)} begins with {user}, and this machine has no such user; write the whole path, or "
            f"./{text} for a name that begins with ~"
        )
    return home


def expanded_values(value: Any) -> Any:
    """Options of another program, at any depth, with every text that begins with `~/` expanded.

    A text may be no path, so a variable is refused only where one begins a path: at the start, and after `/` or `:`.
    Raises ConfigError for it.
    """
    if isinstance(value, Mapping):
        return {key: expanded_values(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [expanded_values(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if variable := _PATH_IN_TEXT.search(value):
        raise ConfigError(_variable_refused(value, variable[0]))
    return home_expanded(value)


def home_expanded(word: str) -> str:
    """A word of another program's command line, with the home folder in place of a leading `~/`."""
    return os.path.expanduser(word) if word.startswith("~/") else word


def link_to_nothing(path: Path) -> str:
    """Words on a link that leads to nothing, which is the path or a folder on the way to it; "" where there is none."""
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            return f"{place} is a link to {os.readlink(place)}, which does not exist; bring it back, or renew the link"
    return ""


def _variable_refused(text: str, variable: str) -> str:
    return (
        f"{show(text)} has the variable {variable}, and paths are taken as they are written; write the whole path, or "
        "let the shell replace the variable on the command line, outside of single quotes"
    )
