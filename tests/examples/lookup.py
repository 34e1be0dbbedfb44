"""An environment of your own, and its prompts: what a key stands for is known to a tool alone (see lookup.yaml)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from megappo.environments.session import Session


def keys(*, held_out: bool) -> Iterator[dict[str, str]]:
    """A data source: numbers of two digits, every fifth of which is held out."""
    yield from ({"prompt": f"{n:02}=", "answer": f"{n:02}"} for n in range(100) if (n % 5 == 0) == held_out)


def entry(text: str) -> str:
    """What a text stands for: two digits that nobody can guess."""
    return f"{random.Random(text).randrange(100):02}"


def share(said: str, wanted: str) -> float:
    """How much of a text and of its end is right."""
    return (sum(a == b for a, b in zip(said, wanted, strict=False)) + (said == f"{wanted}<eos>")) / 3


class Lookup:
    """The model says the key, hears what that stands for, and says it; a fifth of the reward is for the first turn."""

    def __init__(self, *, answers: bool = True) -> None:
        self._answers = answers

    async def run(self, session: Session) -> float:
        key = str(session.prompt.answer)
        asked = await session.generate()
        session.reward(0.2 * share(asked.raw_text, key))
        async with session.using("lookup"):
            found = entry(asked.text) if self._answers else "++"
        session.observe(f"{found}=")
        said = (await session.generate()).raw_text
        return 0.4 * share(said, entry(key)) + 0.4 * self._answers * share(said, found)
