"""Which engine answers which request: no network, so that a test can play all ranks of a large run.

Prompts are numbered over all ranks and dealt out by their number like cards. Ranks need not talk to each other for
that, and engines get equal numbers of prompts, however few a single rank has. All samples of a prompt go to one
engine, whose prefix cache then computes the prompt once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class _Prompt:
    """The samples of one prompt that nobody has begun, and what deals them out again if their engine fails."""

    number: int
    """Over all ranks; once it is dealt, among the prompts that were dealt to the same engine."""
    waiting: deque[int] = field(default_factory=deque)
    begun: bool = False
    """Some of its samples were handed to its engine, so the others stay there."""


class Deal:
    """The requests of one rank that wait, by engine."""

    def __init__(self, engines: Sequence[int], prompt_ids: Mapping[int, int]) -> None:
        """`engines` in the same order on every rank; `prompt_ids` has the number of each request's prompt, and hands
        requests out in its own order."""
        self._engines = list(engines)
        self._hands: dict[int, deque[_Prompt]] = {engine: deque() for engine in engines}
        prompts = {number: _Prompt(number) for number in prompt_ids.values()}
        self._prompt_of = {request: prompts[number] for request, number in prompt_ids.items()}
        for request, prompt in self._prompt_of.items():
            prompt.waiting.append(request)
        self._give(prompts.values(), first=0)

    @property
    def waiting(self) -> bool:
        """Whether there is anything to hand out."""
        return any(self._hands.values())

    def take(self, engine: int, most: int) -> list[int]:
        """The next requests for an engine: at most so many, fewer towards the end, and whole prompts where they fit."""
        hand, taken = self._hands[engine], list[int]()
        share = -(-sum(len(prompt.waiting) for prompt in hand) // 4)
        while hand and len(taken) < min(share, most):
            prompt = hand[0]
            if taken and len(taken) + len(prompt.waiting) > most:
                break
            prompt.begun = True
            taken += [prompt.waiting.popleft() for _ in range(min(most - len(taken), len(prompt.waiting)))]
            if not prompt.waiting:
                hand.popleft()
        return taken

    def relieve(self, engine: int) -> bool:
        """Let an engine that is free have a whole prompt of the one behind which most wait; false: nothing waits."""
        donors = sorted((e for e in self._engines if e != engine), key=lambda e: -len(self._hands[e]))
        for donor in donors:
            for prompt in reversed(self._hands[donor]):
                if not prompt.begun:
                    self._hands[donor].remove(prompt)
                    self._hands[engine].append(prompt)
                    return True
        return False

    def lose(self, engine: int, owed: Iterable[int]) -> None:
        """An engine failed: what it owes and what waits for it is dealt out to the others."""
        lost = {id(prompt): prompt for prompt in self._hands.pop(engine)}
        for request in owed:
            prompt = self._prompt_of[request]
            prompt.waiting.append(request)
            lost[id(prompt)] = prompt
        position = self._engines.index(engine)
        self._engines.remove(engine)
        for prompt in lost.values():
            prompt.begun = False
        self._give(lost.values(), first=position)

    def _give(self, prompts: Iterable[_Prompt], first: int) -> None:
        """One to each engine in turn, from the one at position `first` on. The quotient numbers the prompts of an
        engine, so that they can be dealt out evenly once more."""
        count = len(self._engines)
        for prompt in prompts:
            if not count:
                return  # left to the caller
            engine = self._engines[(first + prompt.number) % count]
            prompt.number //= count
            self._hands[engine].append(prompt)
