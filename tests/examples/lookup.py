"""An environment of your own, and its prompts: what a key stands for is known to a tool alone (see lookup.yaml)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from megappo.environments.session import Session

CALL_SHARE = 0.1
"""Of the reward, for the call."""


def keys(*, held_out: bool) -> Iterator[dict[str, str]]:
    """A data source: numbers of two digits, whose first is the key. Those whose digits add up to a multiple of 5 are
    held out, so that every digit is seen in both places."""
    for n in range(100):
        if ((n // 10 + n % 10) % 5 == 0) == held_out:
            yield {"prompt": f"{n:02}=", "answer": f"{n // 10}"}


def share(said: str, wanted: str) -> float:
    """How many characters of a text are right; half of that for a text that does not end there."""
    right = sum(a == b for a, b in zip(said, wanted, strict=False)) / len(wanted)
    return right if said == f"{said[: len(wanted)]}<eos>" else right / 2


class Lookup:
    """The model says the key, hears the digits that it stands for, and says them.

    What keys stand for is drawn anew for every episode: nobody can learn it by heart. `answers`: the tool works.
    `strict`: a wrong call ends the episode, so that the model learns to call before it learns to answer. `entries`: a
    key stands for one of the numbers below it.
    """

    def __init__(self, *, answers: bool = True, strict: bool = False, entries: int = 100) -> None:
        self._answers, self._strict, self._entries = answers, strict, entries

    async def run(self, session: Session) -> float | None:
        key, draw = str(session.prompt.answer), random.Random(session.seed)
        asked = await session.generate()
        session.reward(CALL_SHARE * share(asked.raw_text, key))
        is_right = asked.raw_text == f"{key}<eos>"
        if self._strict and not is_right:
            return None
        async with session.using("lookup"):
            digits = len(str(self._entries - 1))
            entry = f"{draw.randrange(self._entries):0{digits}}"
        session.observe(f"{entry if self._answers else '+' * digits}=")
        said = (await session.generate()).raw_text
        return (1 - CALL_SHARE) * is_right * share(said, entry)
