"""YAML as its version 1.2 core schema reads it.

PyYAML follows YAML 1.1, where `1e-5` is text (its floats need a dot and a signed exponent), `010` is 8, `1:30` is 90,
`no` is false and `2026-01-02` is a date. Each of those is a trap in a settings file, the first one in every learning
rate. The loader here knows the core schema only: null, true/false, whole numbers (decimal, 0o, 0x), numbers, text,
lists and mappings. It also refuses a key that stands twice in a mapping, of which PyYAML silently keeps the last.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from megappo.config.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_CORE_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
)


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the core schema's scalars and without duplicate keys."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def compose_mapping_node(self, anchor: str | None) -> Any:
        """Compose a mapping; a key that stands in it twice is an error."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(
                        None,
                        None,
                        f"the key '{key.value}' stands twice in this section; remove one",
                        key.start_mark,
                    )
                seen.add((key.tag, key.value))
        return node

    def construct_core_int(self, node: Any) -> int:
        """A whole number: decimal (leading zeros mean nothing), 0o17 or 0xff."""
        text = self.construct_scalar(node)
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)


class _CoreDumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else; never writes anchors."""

    def ignore_aliases(self, data: object) -> bool:
        """Write every value out in full."""
        return True


_CoreLoader.add_constructor(_TAG + "int", _CoreLoader.construct_core_int)
for _name, _pattern, _first in _CORE_SCALARS:
    for _yaml_class in (_CoreLoader, _CoreDumper):
        _yaml_class.add_implicit_resolver(
            _TAG + _name, re.compile(f"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
        )


def parse_yaml(text: str, where: str) -> Any:
    """The value of one YAML document; nothing in it is shared, even where the text uses anchors.

    `where` names the text in errors. Raises ConfigError with the line of a syntax error.
    """
    try:
        return _unshared(yaml.load(text, Loader=_CoreLoader), (), where)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        context = f" {error.context}," if error.context else ""
        raise ConfigError(f"{place}: this is not valid YAML:{context} {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: this is not valid YAML: {error}") from error


def dump_yaml(value: Any) -> str:
    """A value of mappings, lists and scalars as YAML that `parse_yaml` reads back to the same."""
    return str(yaml.dump(value, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=110))


def _unshared(value: Any, ancestors: tuple[int, ...], where: str) -> Any:
    """A copy in which an anchor's value stands separately in each place, so that an override changes only one."""
    if not isinstance(value, (dict, list)):
        return value
    if id(value) in ancestors:
        raise ConfigError(f"{where}: an anchor contains itself; write the value out")
    inside = (*ancestors, id(value))
    if isinstance(value, list):
        return [_unshared(item, inside, where) for item in value]
    return {key: _unshared(item, inside, where) for key, item in value.items()}
