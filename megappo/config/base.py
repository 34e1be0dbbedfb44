"""The base class of all sections of the settings, and the types of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from megappo.errors import expanded

LARGEST_WORLD = 1 << 14
"""Maximum number of ranks of a run."""
SettingValue = TypeVar("SettingValue")
"""Type of a value from the user. A validator returns the value unchanged or replaces it."""
_LONGEST_PATH_BYTES, _LONGEST_NAME_BYTES = 4095, 255  # limits of Linux


def _expanded_path(path: Path) -> Path:
    return Path(expanded(path))


def _fits_a_file_system(path: str | Path) -> str | Path:
    text = str(path).encode(errors="surrogateescape")
    longest = max(len(part) for part in text.split(b"/"))
    if len(text) > _LONGEST_PATH_BYTES or longest > _LONGEST_NAME_BYTES:
        raise ValueError(
            f"the path has {len(text)} bytes and its longest part has {longest}; the limits of file systems are "
            f"{_LONGEST_PATH_BYTES} and {_LONGEST_NAME_BYTES}, so shorten the path"
        )
    return path


# Every number has an upper bound. The bound is far above useful values, and far below values that would cost minutes
# or all memory before an error appears. Attention kernels use 32-bit token positions.
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
PositiveFloat = Annotated[float, Field(gt=0.0, le=1e9)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=1e9)]
Seconds = Annotated[float, Field(gt=0.0, le=1e6)]  # the system cannot wait for more than 2^31 milliseconds
WholeSeconds = Annotated[int, Field(gt=0, le=10**6)]
Ranks = Annotated[int, Field(gt=0, le=LARGEST_WORLD)]
Processes = Annotated[int, Field(gt=0, le=4096)]
"""Threads or processes on one machine."""
Bytes = Annotated[int, Field(gt=0, le=2**40)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
StepNumbers = Annotated[tuple[PositiveInt, ...], Field(strict=False)]
TokenIds = Annotated[tuple[NonNegativeInt, ...], Field(strict=False)]  # YAML has lists, strict mode requires tuples
Text = Annotated[str, Field(min_length=1, max_length=1000)]
PathOrName = Annotated[str, Field(min_length=1), AfterValidator(_fits_a_file_system)]
"""A path, or a name that an external server or library resolves."""
PathText = Annotated[PathOrName, AfterValidator(expanded)]
"""A file, a folder or a name. A leading `~` is expanded."""
PathFromText = Annotated[Path, Field(strict=False), AfterValidator(_expanded_path), AfterValidator(_fits_a_file_system)]


def rule_of_one(remedy: str = "give one of them", **settings: object) -> Iterator[str]:
    """Check that exactly one of these settings is set. Yield a sentence for a violation."""
    names = [name for name, value in settings.items() if value is not None]
    if len(names) != 1:
        problem = f"{' and '.join(names)} are given together" if names else f"none of {', '.join(settings)} is given"
        yield f"{problem}; {remedy}"


class Settings(BaseModel):
    """Base class of every section: frozen, without unknown keys, without silent conversion of strings to numbers."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    plain_forms: ClassVar[str] = ""
    """Values that are valid instead of the section, such as `true or false`. The empty string means that there are
    none."""

    def broken_rules(self) -> Iterator[str]:
        """Yield a sentence for each violated rule between settings of the section. Only the first sentence is
        reported."""
        yield from ()

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        for sentence in self.broken_rules():
            raise ValueError(sentence)
        return self
