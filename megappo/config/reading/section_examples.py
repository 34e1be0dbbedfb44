"""Examples of sections, for a value that the user wrote instead of a section."""

from __future__ import annotations

import re
import shlex
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeAlias

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megappo.config.base import Settings
from megappo.config.fields import adapter_of, section_of
from megappo.errors import show
from megappo.files.json_values import JSONValue

_PREFERRED = ("path", "source", "function", "name")
"""Names of settings that probably take the value if no setting is required. The most likely name is first."""
_PLAIN = re.compile(r"[\w./~@+-]+(?::[\w./~@+-]+)*")
"""Text that needs no quotes inside `{}`."""
Example: TypeAlias = "dict[str, str | Example]"
"""Settings of a section by name. A value is a text, or the settings of an inner section."""


def section_example(section: type[Settings], value: JSONValue) -> Example:
    """Return an example of the section.

    Required settings get the value, or a placeholder if the value has the wrong type. If no setting is required, the
    setting that most likely takes the value gets the value.
    """
    plain = {name: field for name, field in section.model_fields.items() if section_of(field) is None}
    required = {name: _text(field, value) for name, field in plain.items() if field.is_required()}
    if required:
        return {**required}
    taking = [name for name, field in plain.items() if _takes(field, value)]
    inner = {
        name: inner_section
        for name, field in section.model_fields.items()
        if (inner_section := section_of(field)) is not None
    }
    preferred = [name for name in _PREFERRED if name in taking]
    if not preferred and isinstance(value, str):
        for name, inner_section in inner.items():
            if any(field.is_required() and _takes(field, value) for field in inner_section.model_fields.values()):
                return {name: section_example(inner_section, value)}
    likely = next(iter([*preferred, *taking, *plain]), None)
    if likely is not None:
        return {likely: _text(plain[likely], value)}
    name, inner_section = next(iter(inner.items()))
    return {name: section_example(inner_section, value)}


def in_yaml(example: Example) -> str:
    """Format an example as YAML, such as `{source: x.jsonl}`."""
    shown = (f"{name}: {inner if isinstance(inner, str) else in_yaml(inner)}" for name, inner in example.items())
    return "{" + ", ".join(shown) + "}"


def as_overrides(key: str, example: Example) -> str:
    """Format an example as overrides for a shell, such as `data.train.source=x.jsonl`."""
    overrides = (
        shlex.quote(f"{key}.{name}={inner}") if isinstance(inner, str) else as_overrides(f"{key}.{name}", inner)
        for name, inner in example.items()
    )
    return " ".join(overrides)


def _text(field: FieldInfo, value: JSONValue) -> str:
    """Return the value as YAML text, or a placeholder if the field does not accept the value."""
    if _takes(field, value):
        shown = show(value)
        return value if isinstance(value, str) and shown == repr(value) and _PLAIN.fullmatch(value) else shown
    kinds = set(_kinds(field.annotation))
    if kinds & {int, float}:
        return "NUMBER"
    return "true" if bool in kinds else "TEXT"


def _kinds(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for inner in typing.get_args(annotation):
            yield from _kinds(inner)
    else:
        yield annotation


def _takes(field: FieldInfo, value: JSONValue) -> bool:
    try:
        adapter_of(field).validate_python(value)
    except ValidationError:
        return False
    return True
