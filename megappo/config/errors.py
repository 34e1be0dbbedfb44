"""What goes wrong with settings, said in sentences that name the value, the rule and the remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

_LONGEST_SHOWN_VALUE = 60
_MOST_DIGITS = 19


class ConfigError(ValueError):
    """Settings that cannot be run; `problems` holds one sentence each."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        found = (problems,) if isinstance(problems, str) else tuple(problems)
        self.problems: tuple[str, ...] = tuple(one_line(problem) for problem in found)
        super().__init__("\n".join(self.problems))


def one_line(text: str) -> str:
    """A text on one line, with escapes in place of what a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))


def shortened(text: str, characters: int = _LONGEST_SHOWN_VALUE) -> str:
    """At most so many characters of a text."""
    return text if len(text) <= characters else text[: characters - 3] + "..."


def show(value: object) -> str:
    """A value as the user would write it in YAML, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(repr(value))


def either(choices: Iterable[object]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    texts = [str(choice) for choice in choices]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def nearest_numbers(value: int, choices: Iterable[int]) -> str:
    """The nearest of `choices` below and above `value`, as words; `choices` must not be empty."""
    ordered = sorted(set(choices))
    below = [choice for choice in ordered if choice <= value]
    above = [choice for choice in ordered if choice > value]
    return either(below[-1:] + above[:1])


def nearest_word(word: str, choices: Sequence[str], cutoff: float = 0.0) -> str | None:
    """The choice most like `word`; None if all are less alike than `cutoff` (0 to 1)."""
    found = difflib.get_close_matches(word[:_LONGEST_SHOWN_VALUE].lower(), choices, n=1, cutoff=cutoff)
    return found[0] if found else None


def whole_number(text: str) -> int | None:
    """The number of plain digits that a program or user wrote; None for anything else, and for absurdly many digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending; takes its square root in steps."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def raised_by_megappo(error: ValueError) -> bool:
    """Whether our own code refused a value; a ValueError from a library is a bug and keeps its traceback."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and str(traceback.tb_frame.f_globals.get("__name__")).split(".")[0] == "megappo"
