"""The type of what JSON holds, and YAML by its core schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

JSONValue: TypeAlias = bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"] | None
"""What was read has lists and dicts; what is to be written may have anything that `json.dumps` writes as such."""
