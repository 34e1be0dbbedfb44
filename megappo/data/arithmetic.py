"""Sums as prompts, for the quickstart and for experiments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from string import Formatter

from megappo.files.json_values import JSONValue


def sums(*, max_operand: int, template: str = "{a}+{b}=", modulus: int | None = None) -> Iterator[dict[str, str]]:
    """Yield each pair 0 <= a, b <= max_operand once, with the sum (modulo `modulus`) as the answer.

    Raises ValueError if an option is invalid.
    """
    _check_whole("max_operand", max_operand, 0)
    if modulus is not None:
        _check_whole("modulus", modulus, 1)
    if _fields(template) != {"a", "b"}:
        raise ValueError(f"template is {template!r}, must contain {{a}} and {{b}} and no other field; change it")
    for a, b in itertools.product(range(max_operand + 1), repeat=2):
        total = a + b if modulus is None else (a + b) % modulus
        yield {"prompt": template.format(a=a, b=b), "answer": str(total)}


def _check_whole(name: str, value: JSONValue, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, must be a whole number of at least {least}; change it")


def _fields(template: str) -> set[str] | None:
    """Return the names in braces, or None if the braces do not match."""
    try:
        return {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError:
        return None
