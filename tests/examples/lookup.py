"""A custom environment and its prompts. Only a tool can map a key to its number (see lookup.yaml)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from megappo.environments.session import Session

CALL_SHARE = 0.1
"""Share of the reward for the call."""


def keys(*, held_out: bool) -> Iterator[dict[str, str]]:
    """Yield the prompts of a data source: numbers of two digits, whose first digit is the key. Numbers with a digit
    sum that is a multiple of 5 are held out, so every digit occurs in both positions."""
    for n in range(100):
        if ((n // 10 + n % 10) % 5 == 0) == held_out:
            yield {"prompt": f"{n:02}=", "answer": f"{n // 10}"}


def share(text: str, expected: str) -> float:
    """Return the share of right characters, halved if the text does not end after the expected characters."""
    right = sum(a == b for a, b in zip(text, expected, strict=False)) / len(expected)
    return right if text == f"{text[: len(expected)]}<eos>" else right / 2


class Lookup:
    """The model writes the key, receives the digits for this key, and repeats them.

    The digits are drawn for every episode, so a model cannot memorize them. `answers`: the tool works. `strict`: a
    wrong call ends the episode, so the model learns to call before it learns to answer. `entries`: upper bound of the
    numbers.
    """

    def __init__(self, *, answers: bool = True, strict: bool = False, entries: int = 100) -> None:
        self._answers, self._strict, self._entries = answers, strict, entries

    async def run(self, session: Session) -> float | None:
        key, draw = str(session.prompt.answer), random.Random(session.seed)
        call = await session.generate()
        session.reward(CALL_SHARE * share(call.raw_text, key))
        is_right = call.raw_text == f"{key}<eos>"
        if self._strict and not is_right:
            return None
        async with session.using("lookup"):
            digits = len(str(self._entries - 1))
            entry = f"{draw.randrange(self._entries):0{digits}}"
        session.observe(f"{entry if self._answers else '+' * digits}=")
        answer = (await session.generate()).raw_text
        return (1 - CALL_SHARE) * is_right * share(answer, entry)
