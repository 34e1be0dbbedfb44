"""The base class of all sections of the settings, and the types of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from megappo.errors import expanded

LARGEST_WORLD = 1 << 14
"""Most ranks of a run."""
Given = TypeVar("Given")
"""A value as the user gave it, which is handed on unless a function replaces it."""
_LONGEST_PATH_BYTES, _LONGEST_NAME_BYTES = 4095, 255  # what Linux takes


def _expanded_path(path: Path) -> Path:
    return Path(expanded(path))


def _fits_a_file_system(path: str | Path) -> str | Path:
    text = str(path).encode(errors="surrogateescape")
    longest = max(len(part) for part in text.split(b"/"))
    if len(text) > _LONGEST_PATH_BYTES or longest > _LONGEST_NAME_BYTES:
        raise ValueError(
            f"a path of {len(text)} bytes whose longest part has {longest}; file systems take {_LONGEST_PATH_BYTES} "
            f"and {_LONGEST_NAME_BYTES}, so shorten it"
        )
    return path


# Every number has an upper bound: far above what a run can use, far below what costs minutes or all memory before
# anything says so. Positions of tokens are 32-bit numbers in attention kernels.
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
PositiveFloat = Annotated[float, Field(gt=0.0, le=1e9)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=1e9)]
Seconds = Annotated[float, Field(gt=0.0, le=1e6)]  # waiting for more milliseconds than 2^31 is an error of the system
WholeSeconds = Annotated[int, Field(gt=0, le=10**6)]
Ranks = Annotated[int, Field(gt=0, le=LARGEST_WORLD)]
Processes = Annotated[int, Field(gt=0, le=4096)]
"""Threads or processes on one machine."""
Bytes = Annotated[int, Field(gt=0, le=2**40)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
StepNumbers = Annotated[tuple[PositiveInt, ...], Field(strict=False)]
TokenIds = Annotated[tuple[NonNegativeInt, ...], Field(strict=False)]  # YAML has lists, strict mode wants tuples
Text = Annotated[str, Field(min_length=1, max_length=1000)]
PathOrName = Annotated[str, Field(min_length=1), AfterValidator(_fits_a_file_system)]
"""A path, or a name that an external server or library resolves."""
PathText = Annotated[PathOrName, AfterValidator(expanded)]
"""A file, a folder or a name. A leading `~` is expanded."""
PathFromText = Annotated[Path, Field(strict=False), AfterValidator(_expanded_path), AfterValidator(_fits_a_file_system)]


def rule_of_one(remedy: str = "give one of them", **settings: object) -> Iterator[str]:
    """A rule: exactly one of these settings is given."""
    given = [name for name, value in settings.items() if value is not None]
    if len(given) != 1:
        words = f"{' and '.join(given)} are given together" if given else f"none of {', '.join(settings)} is given"
        yield f"{words}; {remedy}"


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

    plain_forms: ClassVar[str] = ""
    """What may stand in place of the section, such as `true or false`; "": nothing."""

    def broken_rules(self) -> Iterator[str]:
        """A sentence for each rule between settings of the section that they break; the first is told."""
        yield from ()

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        for sentence in self.broken_rules():
            raise ValueError(sentence)
        return self
