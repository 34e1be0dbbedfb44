"""All settings, read from their classes, for `megappo settings` and the tables in documents."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megappo.config.schema import Config

_GUARDS = 10**6
"""Size of bounds that only reject implausible values. Documents omit bounds of at least this size."""
_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
_TYPE_NAMES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "null": "null"}


class SettingFacts(NamedTuple):
    """Readable description of a field of a section."""

    name: str
    value: str
    """Accepted values, such as `integer > 0`, or `section` for a field that is a section."""
    default: str
    """Default in YAML, or `required`."""
    meaning: str
    section: str | None
    """Kind of the section (`SectionFacts.kind`) if the field is a section, otherwise None."""


class SectionFacts(NamedTuple):
    """Kind of a section. Several places in the settings can have the same kind."""

    kind: str
    places: tuple[str, ...]
    """Dotted keys, such as `actor.optimizer` and `critic.optimizer`."""
    about: str
    settings: tuple[SettingFacts, ...]


@functools.cache
def sections() -> tuple[SectionFacts, ...]:
    """Return every kind of section. A section precedes the sections that it contains."""
    schema = Config.model_json_schema()
    places: dict[str, list[str]] = {}
    for path, kind in _places(schema["$defs"], schema["properties"]):
        places.setdefault(kind, []).append(path)
    facts = []
    for kind, paths in places.items():
        section = schema["$defs"][kind]
        required = section.get("required", ())
        settings = [_facts(name, field, is_required=name in required) for name, field in section["properties"].items()]
        about = schema["properties"].get(paths[0], {}).get("description", "")
        facts.append(SectionFacts(kind, tuple(paths), about, tuple(settings)))
    return tuple(facts)


def _facts(name: str, field: Mapping[str, Any], *, is_required: bool) -> SettingFacts:
    inner = _kind_of(field)
    default = _yaml(field.get("default", {}))
    if is_required:
        default = "required"
    elif inner and field.get("default"):
        default = "its defaults"
    meaning = " ".join(field["description"].split())
    return SettingFacts(name, "section" if inner else _describe_values(field), default, meaning, inner)


def _places(kinds: Mapping[str, Any], properties: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the kind of each section in `properties`. A section precedes its inner sections."""
    for name, field in properties.items():
        if (kind := _kind_of(field)) is not None:
            yield f"{path}{name}", kind
            yield from _places(kinds, kinds[kind]["properties"], f"{path}{name}.")


def _kind_of(schema: Mapping[str, Any]) -> str | None:
    """Return the class name of a section, or None for a plain setting."""
    for candidate in (schema, *schema.get("anyOf", ())):
        if "$ref" in candidate:
            return str(candidate["$ref"]).split("/")[-1]
    return None


def _describe_values(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_describe_values(choice) for choice in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{_yaml(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: {', '.join(map(_describe_values, schema['prefixItems']))}"
    if kind == "array":
        return f"list of {_describe_values(schema['items'])}"
    if kind == "object":
        return "mapping"
    bounds = [f"{sign} {schema[key]:g}" for key, sign in _BOUNDS if key in schema and abs(schema[key]) < _GUARDS]
    return " ".join([_TYPE_NAMES.get(kind, kind), ", ".join(bounds)]).strip()


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
