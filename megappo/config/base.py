"""What every section of the settings has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
TokenIds = Annotated[tuple[NonNegativeInt, ...], Field(strict=False)]  # YAML has lists, strict mode wants tuples
PathFromText = Annotated[Path, Field(strict=False)]


class Settings(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent coercion of strings to numbers."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )
