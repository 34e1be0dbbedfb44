"""Which server answers which request: no network, so that a test can play all ranks of a large run.

Prompts are numbered over all ranks and dealt out by their number like cards. Ranks need not talk to each other for
that, and servers get equal numbers of prompts, however few a single rank has. Which of its prompts goes to which of
the servers that its cards name, a rank chooses so that they owe it equally many tokens. All samples of a prompt go to
one server, whose prefix cache then computes the prompt once, and so do all turns of an episode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megappo.engines.sglang.owing import OwedTokens

FAR_BUSIER = 2.0
"""A turn that finds its server full waits there, unless one with room owes less than its tokens by this: another server
has to compute the whole conversation anew."""


@dataclass
class _DealtPrompt:
    """The samples of one prompt that nobody has begun, and what deals them out again if their server fails."""

    number: int
    """Over all ranks; once it is dealt, among the prompts that were dealt to the same server."""
    waiting: deque[int] = field(default_factory=deque)
    begun: bool = False
    """Some of its samples were handed to its server, so the others stay there."""
    follows: bool = False
    """It is a turn after others, which its server has in its cache."""


class RequestAssignment:
    """The requests of one rank that wait, by server."""

    def __init__(
        self,
        servers: Sequence[int],
        prompt_ids: Mapping[int, int],
        prompt_tokens: Mapping[int, int] | None = None,
        most_response_tokens: int = 1,
        homes: Mapping[int, int] | None = None,
    ) -> None:
        """`servers` in the same order on every rank; `prompt_ids` has the number of each request's prompt, and hands
        requests out in its own order. `prompt_tokens`: of each request; default: none. `homes`: of requests that go on
        from what a server has answered, that server, which then has all of the prompt's."""
        self._servers = list(servers)
        self.owed = OwedTokens(servers, most_response_tokens)
        self._hands: dict[int, deque[_DealtPrompt]] = {server: deque() for server in servers}
        self._tokens = {request: (prompt_tokens or {}).get(request, 0) for request in prompt_ids}
        self._home: dict[int, int] = {}
        """The server that each request went to last, which has the episode's turns in its cache."""
        self._home_of_prompt: dict[int, int] = {}
        prompts = {number: _DealtPrompt(number) for number in prompt_ids.values()}
        self._prompt_of = {request: prompts[number] for request, number in prompt_ids.items()}
        for request, prompt in self._prompt_of.items():
            prompt.waiting.append(request)
        new = list[_DealtPrompt]()
        for prompt in prompts.values():
            home = (homes or {}).get(prompt.waiting[0])
            if home in self._hands:
                self._put_at_home(prompt, home)
            else:
                new.append(prompt)
        self._give(new, first=0)

    def add(self, request: int, prompt_id: int, prompt_tokens: int = 0) -> None:
        """One more request. The turn of an episode after others, which has their number, is for the server that the
        last one went to, an episode's first turn for the one that this prompt's others went to."""
        last = self._home.get(request)
        home = last if last in self._hands else self._home_of_prompt.get(prompt_id)
        prompt = _DealtPrompt(prompt_id, deque([request]), follows=last in self._hands)
        self._prompt_of[request], self._tokens[request] = prompt, prompt_tokens
        if home in self._hands:
            self._put_at_home(prompt, home)
        else:
            self._give([prompt], first=0)
        if (home := self._home.get(request)) is not None:
            self._home_of_prompt[prompt_id] = home

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

    def answered(self, server: int, responses: Mapping[int, int]) -> None:
        """A server has answered requests with so many tokens each."""
        self.owed.answered(server, sum(self._tokens[request] for request in responses), responses.values())

    def relieve(self, server: int) -> bool:
        """Let a server that is free have a whole prompt of the one that owes most of those behind which some wait, or
        a turn of one that owes far more; false: nothing waits that may leave."""
        donors = sorted((e for e in self._servers if e != server and self._hands[e]), key=lambda e: -self.owed.of(e))
        for donor in donors:
            far_busier = self.owed.of(donor) > FAR_BUSIER * self.owed.of(server)
            for prompt in reversed(self._hands[donor]):
                if not prompt.begun and (far_busier or not prompt.follows):
                    self._hands[donor].remove(prompt)
                    self.owed.add(donor, -self._prompt_tokens(prompt), -len(prompt.waiting))
                    self._put(prompt, server)
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
        self.owed.lose(server)
        for prompt in lost.values():
            prompt.begun = prompt.follows = False
        self._give(lost.values(), first=position)

    def _give(self, prompts: Iterable[_DealtPrompt], first: int) -> None:
        """One to each server in turn, from the one at position `first` on. The quotient numbers the prompts of a
        server, so that they can be dealt out evenly once more.

        So many prompts each server gets. Which of them is up to the rank: the largest first, to the server that owes
        the fewest tokens.
        """
        count, cards = len(self._servers), dict[int, deque[int]]()
        if not count:
            return  # left to the caller
        dealt = list(prompts)
        for prompt in dealt:
            server = self._servers[(first + prompt.number) % count]
            cards.setdefault(server, deque()).append(prompt.number // count)
        for prompt in sorted(dealt, key=lambda p: -self.owed.worth(self._prompt_tokens(p), len(p.waiting))):
            server = min(cards, key=self.owed.of)
            prompt.number = cards[server].popleft()
            if not cards[server]:
                del cards[server]
            self._put(prompt, server)

    def _put_at_home(self, prompt: _DealtPrompt, server: int) -> None:
        prompt.number //= len(self._servers)
        self._put(prompt, server)

    def _put(self, prompt: _DealtPrompt, server: int) -> None:
        self._hands[server].append(prompt)
        self.owed.add(server, self._prompt_tokens(prompt), len(prompt.waiting))
        self._home |= dict.fromkeys(prompt.waiting, server)

    def _prompt_tokens(self, prompt: _DealtPrompt) -> int:
        return sum(self._tokens[request] for request in prompt.waiting)
