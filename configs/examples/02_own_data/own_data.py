"""Prompts such as "17+17=" with the answer "34"."""

from __future__ import annotations

from collections.abc import Iterator


def doubles(*, limit: int, first: int = 0) -> Iterator[dict[str, str]]:
    """Yield one row for each prompt. `options` of the source are the arguments."""
    for number in range(first, limit):
        yield {"prompt": f"{number}+{number}=", "answer": str(2 * number)}
