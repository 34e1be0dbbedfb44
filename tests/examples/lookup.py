"""An environment of your own, and its prompts: what a key stands for is known to a tool alone.

rollout:
  environment: {name: examples.lookup:Lookup, max_turns: 2}
reward: {function: environment}
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from megappo.environments.session import Session

KEYS = [f"{number:02}" for number in range(100)]


def keys(*, held_out: bool) -> Iterator[dict[str, str]]:
    """A data source: every fifth key is held out."""
    for number, key in enumerate(KEYS):
        if (number % 5 == 0) == held_out:
            yield {"prompt": f"{key}=", "answer": key}


def share(said: str, wanted: str) -> float:
    """How much of a text and its end is right."""
    letters = said.removesuffix("<eos>")
    return (sum(a == b for a, b in zip(letters, wanted, strict=False)) + (said == wanted + "<eos>")) / (len(wanted) + 1)


class Lookup:
    """The model says the key, hears what it stands for, and says that; a fifth of the reward is for the first turn."""

    def __init__(self, *, answers: bool = True) -> None:
        self._entries = dict(zip(KEYS, random.Random(0).sample(KEYS, len(KEYS)), strict=True))
        self._answers = answers

    async def run(self, session: Session) -> float:
        """See `megappo.environments.protocol.Environment.run`."""
        asked = await session.generate()
        session.reward(0.2 * share(asked.raw_text, str(session.prompt.answer)))
        async with session.using("lookup"):
            found = self._entries.get(asked.text, "++") if self._answers else "++"
        session.observe(f"{found}=")
        said = await session.generate()
        return 0.8 * share(said.raw_text, self._entries[str(session.prompt.answer)])
