"""A game in which the model guesses a number with hints: `rollout.environment.name: guess`, and prompts for the
game."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from megappo.environments.session import Session
from megappo.errors import whole_number


def numbers(
    *, highest: int, count: int, template: str = "Guess a whole number from 1 to {highest}."
) -> Iterator[dict[str, str]]:
    """Yield `count` prompts, each with a number from 1 to `highest` as its answer.

    Raises ValueError if the arguments give no prompt.
    """
    if highest < 1 or count < 1:
        raise ValueError(f"highest is {highest} and count {count}, both must be at least 1; change them")
    draw = random.Random(0)
    for _ in range(count):
        yield {"prompt": template.format(highest=highest), "answer": str(draw.randint(1, highest))}


class GuessNumber:
    """Environment of the game. The last number of a reply is the guess. The prompt's answer is the number to find.

    The reward of a correct guess is 1 minus `cost_per_turn` for each earlier turn. The reward is 0 if the turns are
    used up.
    """

    def __init__(
        self,
        *,
        higher: str = "Higher.",
        lower: str = "Lower.",
        unclear: str = "Say a number.",
        cost_per_turn: float = 0.0,
    ) -> None:
        self._higher, self._lower, self._unclear, self._cost = higher, lower, unclear, cost_per_turn

    async def run(self, session: Session) -> float:
        """See `Environment.run`."""
        number = whole_number(session.prompt.answer or "")
        if number is None:
            raise ValueError(f"the prompt's answer is {session.prompt.answer!r}, must be a whole number")
        while True:
            guesses = re.findall(r"\d+", (await session.generate()).text)
            guess = whole_number(guesses[-1]) if guesses else None
            if guess == number:
                return 1.0 - self._cost * (session.turns - 1)
            session.observe(self._unclear if guess is None else self._higher if guess < number else self._lower)
