"""What goes wrong with settings, said in sentences that name the value, the rule and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_LONGEST_SHOWN_VALUE = 60


class ConfigError(ValueError):
    """Settings that cannot be run; `problems` holds one sentence each."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        found = (problems,) if isinstance(problems, str) else tuple(problems)
        self.problems: tuple[str, ...] = tuple(" ".join(problem.split()) for problem in found)
        super().__init__("\n".join(self.problems))


def show(value: object) -> str:
    """A value as the user would write it in YAML, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN_VALUE else text[: _LONGEST_SHOWN_VALUE - 3] + "..."


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
    found = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=cutoff)
    return found[0] if found else None


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def raised_by_megappo(error: ValueError) -> bool:
    """Whether our own code refused a value; a ValueError from a library is a bug and keeps its traceback."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and str(traceback.tb_frame.f_globals.get("__name__")).split(".")[0] == "megappo"
