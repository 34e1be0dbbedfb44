"""Type of JSON values, and of YAML values in the core schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

JSONValue: TypeAlias = bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"] | None
"""Value that `json.dumps` can write. Values that were read contain lists and dicts."""
