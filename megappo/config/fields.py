"""Fields and sections of the configuration by dotted key, and the accepted values of fields."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megappo.config.base import Settings
from megappo.config.schema import Config
from megappo.errors import shortened
from megappo.files.json_values import JSONValue

Key = tuple[str, ...]

ENTRY = "NAME"
"""Placeholder for the name of an entry in keys of mappings with names that the user chooses."""
BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
"""Name of a bound in pydantic and its readable text, by the type of the error."""


def dotted(key: Key) -> str:
    """Return a key in dotted form, such as `actor.optimizer.learning_rate`."""
    return ".".join(shortened(part) for part in key)


def section_of(field: FieldInfo) -> type[Settings] | None:
    """Return the settings class of a section, which can be nullable. Return None for a plain value and for a
    mapping."""
    if typing.get_origin(field.annotation) is dict:
        return None
    for annotation in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, Settings):
            return annotation
    return None


def entries_of(field: FieldInfo) -> type[Settings] | None:
    """Return the settings class of the entries if the field is a mapping from names to sections, otherwise None."""
    for annotation in (field.annotation, *typing.get_args(field.annotation)):
        if typing.get_origin(annotation) is dict:
            entry = typing.get_args(annotation)[1]
            return entry if isinstance(entry, type) and issubclass(entry, Settings) else None
    return None


def find_field(key: Key) -> FieldInfo | None:
    """Return the field at a dotted key of the configuration. For an entry of a mapping, return the field of the
    mapping."""
    return field_and_section(key)[0]


def names_in(key: Key) -> list[str]:
    """Return the names of the settings in the section at `key`. The key () is the top level."""
    section = field_and_section(key)[1]
    return list(section.model_fields) if section is not None else []


def field_and_section(key: Key) -> tuple[FieldInfo | None, type[Settings] | None]:
    """Return the field at a key, and the section that the field contains."""
    section: type[Settings] | None = Config
    field, entries = None, None
    for name in key:
        if entries is not None:
            section, entries = entries, None
            continue
        field = section.model_fields.get(name) if section is not None else None
        if field is None:
            return None, None
        entries = entries_of(field)
        section = None if entries is not None else section_of(field)
    return field, section


@functools.cache
def all_keys() -> tuple[Key, ...]:
    """Return every key of the configuration, including sections. Entries of mappings are not included."""

    def walk(section: type[Settings], prefix: Key) -> Iterator[Key]:
        for name, field in section.model_fields.items():
            yield (*prefix, name)
            if (inner := section_of(field)) is not None:
                yield from walk(inner, (*prefix, name))

    return tuple(walk(Config, ()))


@functools.cache
def keys_of_entries() -> tuple[Key, ...]:
    """Return every key of an entry of a mapping, such as `data.mixture.NAME.weight`."""
    fields = [(key, find_field(key)) for key in all_keys()]
    entries = [(key, entries_of(field)) for key, field in fields if field is not None]
    return tuple((*key, ENTRY, name) for key, entry in entries if entry is not None for name in entry.model_fields)


def is_section(key: Key) -> bool:
    """Return whether a key is a section, or a mapping from names of the user to sections."""
    field = find_field(key)
    return field is not None and (section_of(field) is not None or entries_of(field) is not None)


def takes(key: Key, value: JSONValue) -> bool:
    """Return whether a setting accepts values of this type. Bounds are not checked."""
    if is_section(key):
        return isinstance(value, Mapping)
    try:
        _adapter(key).validate_python(value)
    except ValidationError as error:
        return all(problem["type"] in BOUNDS for problem in error.errors())
    return True


@functools.cache
def _adapter(key: Key) -> TypeAdapter[Any]:
    field = find_field(key)
    assert field is not None
    return adapter_of(field)


def adapter_of(field: FieldInfo) -> TypeAdapter[Any]:
    """Return an adapter that validates values of a field without conversions."""
    kind = typing.cast(Any, typing.Annotated)[(field.annotation, *(field.metadata or [None]))]
    return TypeAdapter(kind, config=ConfigDict(strict=True))


def is_nullable(field: FieldInfo) -> bool:
    """Return whether null is a valid value of a setting."""
    return type(None) in typing.get_args(field.annotation)


def without_places(key: Key) -> Key:
    """Return the key without positions in lists."""
    return tuple(part for part in key if not part.isdigit())
