"""Settings with reasons, and their YAML file with comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import yaml

from megappo.files.json_values import JSONValue

_WIDTH = 110


@dataclass(frozen=True)
class Setting:
    """Setting of a new configuration."""

    key: str
    """Dotted key, such as `rollout.prompts_per_step`."""
    value: JSONValue
    why: str = ""
    """Reason of the value, written as a comment."""


_Tree: TypeAlias = dict[str, "Setting | _Tree"]
"""Settings by section."""


def overridden(settings: Iterable[Setting], changes: Iterable[Setting]) -> list[Setting]:
    """Apply `changes` to the settings in their order, and append settings with new keys. A change of a whole section
    replaces the settings of the section."""
    by_key = {setting.key: setting for setting in settings}
    for setting in changes:
        by_key = {key: s for key, s in by_key.items() if not key.startswith(f"{setting.key}.")} | {setting.key: setting}
    return list(by_key.values())


def to_yaml(settings: Iterable[Setting]) -> str:
    """Format the settings as YAML with their reasons. Sections are in the order of their first setting."""
    tree: _Tree = {}
    for setting in settings:
        *sections, name = setting.key.split(".")
        inner = tree
        for section in sections:
            below = inner.setdefault(section, {})
            assert isinstance(below, dict)
            inner = below
        inner[name] = setting
    return "\n".join(_rows(tree, "")) + "\n"


def _rows(tree: _Tree, indent: str) -> Iterator[str]:
    for name, node in tree.items():
        if isinstance(node, dict):
            yield f"{indent}{name}:"
            yield from _rows(node, indent + "  ")
            continue
        row = f"{indent}{name}: {_flow(node.value)}"
        if node.why and len(row) + 4 + len(node.why) <= _WIDTH:
            yield f"{row}  # {node.why}"
        else:
            yield from textwrap.wrap(node.why, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            yield row


def _flow(value: JSONValue) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).removesuffix("...\n").strip()
