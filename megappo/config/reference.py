"""All settings, read from the classes that define them, for `megappo settings` and the tables of documents."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megappo.config.schema import Config

_GUARDS = 10**6
"""Upper bounds from here on only refuse nonsense; documents leave them out."""
_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
_WORDS = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "null": "null"}


class SettingFacts(NamedTuple):
    """One field of a section, in words."""

    name: str
    value: str
    """The values that it takes, such as `integer > 0`; `section` for one that holds others."""
    default: str
    """Default as YAML writes it; `required` where there is none."""
    meaning: str
    section: str | None
    """The name of the section's kind, as in `SectionFacts`, where it is one."""


class SectionFacts(NamedTuple):
    """A kind of section: several places may have the same settings."""

    kind: str
    places: tuple[str, ...]
    """Dotted keys, such as `actor.optimizer` and `critic.optimizer`."""
    about: str
    settings: tuple[SettingFacts, ...]


@functools.cache
def sections() -> tuple[SectionFacts, ...]:
    """Every kind of section, those that hold others before these."""
    schema = Config.model_json_schema()
    places: dict[str, list[str]] = {}
    for path, kind in _places(schema["$defs"], schema["properties"]):
        places.setdefault(kind, []).append(path)
    found = []
    for kind, paths in places.items():
        section = schema["$defs"][kind]
        required = section.get("required", ())
        settings = [_facts(name, field, is_required=name in required) for name, field in section["properties"].items()]
        about = schema["properties"].get(paths[0], {}).get("description", "")
        found.append(SectionFacts(kind, tuple(paths), about, tuple(settings)))
    return tuple(found)


def _facts(name: str, field: Mapping[str, Any], *, is_required: bool) -> SettingFacts:
    inner = _kind_of(field)
    default = _yaml(field.get("default", {}))
    if is_required:
        default = "required"
    elif inner and field.get("default"):
        default = "its defaults"
    meaning = " ".join(field["description"].split())
    return SettingFacts(name, "section" if inner else _value_words(field), default, meaning, inner)


def _places(kinds: Mapping[str, Any], properties: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, kind) of every section among these properties, a section before those in it."""
    for name, field in properties.items():
        if (found := _kind_of(field)) is not None:
            yield f"{path}{name}", found
            yield from _places(kinds, kinds[found]["properties"], f"{path}{name}.")


def _kind_of(schema: Mapping[str, Any]) -> str | None:
    """The class that a setting is a section of."""
    for candidate in (schema, *schema.get("anyOf", ())):
        if "$ref" in candidate:
            return str(candidate["$ref"]).split("/")[-1]
    return None


def _value_words(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_value_words(choice) for choice in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{_yaml(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: {', '.join(map(_value_words, schema['prefixItems']))}"
    if kind == "array":
        return f"list of {_value_words(schema['items'])}"
    if kind == "object":
        return "mapping"
    bounds = [f"{sign} {schema[key]:g}" for key, sign in _BOUNDS if key in schema and abs(schema[key]) < _GUARDS]
    return " ".join([_WORDS.get(kind, kind), ", ".join(bounds)]).strip()


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
