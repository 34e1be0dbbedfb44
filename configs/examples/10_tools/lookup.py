"""An environment with a tool, and its prompts. Only the tool knows the entry of a key."""

from __future__ import annotations

import random
from collections.abc import Iterator

from megappo.environments.session import Session

CALL_SHARE = 0.1
"""Share of the reward for a correct call of the tool."""


def keys(*, held_out: bool) -> Iterator[dict[str, str]]:
    """Yield prompts: numbers of two digits. The first digit is the key.

    Numbers with a digit sum that is a multiple of 5 are held out. Every digit occurs in both positions of the others.
    """
    for n in range(100):
        if ((n // 10 + n % 10) % 5 == 0) == held_out:
            yield {"prompt": f"{n:02}=", "answer": f"{n // 10}"}


def share(text: str, target: str) -> float:
    """Return the share of correct characters, or half of the share if the text continues after the target."""
    right = sum(a == b for a, b in zip(text, target, strict=False)) / len(target)
    return right if text == f"{text[: len(target)]}<eos>" else right / 2


class Lookup:
    """The model writes a key, receives the entry of the key from the tool, and writes the entry.

    The entries are drawn at random for each episode, so that the model cannot memorise them.
    """

    def __init__(self, *, answers: bool = True, strict: bool = False, entries: int = 100) -> None:
        """Set up the tool.

        Args:
            answers: whether the tool answers.
            strict: end the episode after a wrong call, so that the model learns to call before it learns to answer.
            entries: number of different entries.
        """
        self._answers, self._strict, self._entries = answers, strict, entries

    async def run(self, session: Session) -> float | None:
        """Play one episode, and return the reward of the last turn."""
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
