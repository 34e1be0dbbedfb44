"""Which server answers which request: no network, so that a test can play all ranks of a large run.

Prompts are numbered over all ranks and dealt out by their number like cards. Ranks need not talk to each other for
that, and servers get equal numbers of prompts, however few a single rank has. All samples of a prompt go to one
server, whose prefix cache then computes the prompt once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class _DealtPrompt:
    """The samples of one prompt that nobody has begun, and what deals them out again if their server fails."""

    number: int
    """Over all ranks; once it is dealt, among the prompts that were dealt to the same server."""
    waiting: deque[int] = field(default_factory=deque)
    begun: bool = False
    """Some of its samples were handed to its server, so the others stay there."""


class Deal:
    """The requests of one rank that wait, by server."""

    def __init__(self, servers: Sequence[int], prompt_ids: Mapping[int, int]) -> None:
        """`servers` in the same order on every rank; `prompt_ids` has the number of each request's prompt, and hands
        requests out in its own order."""
        self._servers = list(servers)
        self._hands: dict[int, deque[_DealtPrompt]] = {server: deque() for server in servers}
        prompts = {number: _DealtPrompt(number) for number in prompt_ids.values()}
        self._prompt_of = {request: prompts[number] for request, number in prompt_ids.items()}
        for request, prompt in self._prompt_of.items():
            prompt.waiting.append(request)
        self._give(prompts.values(), first=0)

    def add(self, request: int, prompt_id: int) -> None:
        """One more request, for the server that this prompt's others go to while all servers are well."""
        prompt = _DealtPrompt(prompt_id, deque([request]))
        self._prompt_of[request] = prompt
        self._give([prompt], first=0)

    @property
    def waiting(self) -> bool:
        """Whether there is anything to hand out."""
        return any(self._hands.values())

    def take(self, server: int, most: int) -> list[int]:
        """The next requests for a server: at most so many, fewer towards the end, and whole prompts where they fit."""
        hand, taken = self._hands[server], list[int]()
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

    def relieve(self, server: int) -> bool:
        """Let a server that is free have a whole prompt of the one behind which most wait; false: nothing waits."""
        donors = sorted((e for e in self._servers if e != server), key=lambda e: -len(self._hands[e]))
        for donor in donors:
            for prompt in reversed(self._hands[donor]):
                if not prompt.begun:
                    self._hands[donor].remove(prompt)
                    self._hands[server].append(prompt)
                    return True
        return False

    def lose(self, server: int, owed: Iterable[int]) -> None:
        """A server failed: what it owes and what waits for it is dealt out to the others."""
        lost = {id(prompt): prompt for prompt in self._hands.pop(server)}
        for request in owed:
            prompt = self._prompt_of[request]
            prompt.waiting.append(request)
            lost[id(prompt)] = prompt
        position = self._servers.index(server)
        self._servers.remove(server)
        for prompt in lost.values():
            prompt.begun = False
        self._give(lost.values(), first=position)

    def _give(self, prompts: Iterable[_DealtPrompt], first: int) -> None:
        """One to each server in turn, from the one at position `first` on. The quotient numbers the prompts of an
        server, so that they can be dealt out evenly once more."""
        count = len(self._servers)
        for prompt in prompts:
            if not count:
                return  # left to the caller
            server = self._servers[(first + prompt.number) % count]
            prompt.number //= count
            self._hands[server].append(prompt)
