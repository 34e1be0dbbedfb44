"""Assign requests to servers. The module does not use the network, so a test can simulate all ranks of a large run.

Prompts are numbered over all ranks and dealt to servers by number. Ranks therefore exchange no messages, and servers
receive equal numbers of prompts even if a rank has few prompts. The prompt numbers of a rank determine the number of
its prompts for each server. The rank then chooses the prompts of each server to balance the outstanding tokens. All
samples of a prompt go to one server, whose prefix cache computes the prompt once. All turns of an episode go to one
server too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megappo.engines.sglang.owing import OwedTokens

FAR_BUSIER = 2.0
"""Minimum ratio of outstanding tokens for moving a turn of an episode from a busy server to a server with room. The
other server has no cache of the conversation and must compute the whole prompt."""
_MOST_HOMES = 2**16
"""Maximum number of requests and of prompts whose server is stored. The oldest entries are dropped, because a round
may last for the whole run."""


@dataclass
class _AssignedPrompt:
    """The waiting samples of one prompt, and the number for assigning them again after a server failure."""

    number: int
    """Number of the prompt over all ranks. After the assignment, the number among the prompts of the same server."""
    waiting: deque[int] = field(default_factory=deque)
    begun: bool = False
    """Whether some samples were already sent to the server. The other samples then stay with this server."""
    follows: bool = False
    """Whether this is a later turn of an episode. The cache of the server contains the earlier turns."""


class RequestAssignment:
    """The waiting requests of one rank, by server."""

    def __init__(
        self,
        servers: Sequence[int],
        prompt_ids: Mapping[int, int],
        prompt_tokens: Mapping[int, int] | None = None,
        most_response_tokens: int = 1,
        homes: Mapping[int, int] | None = None,
    ) -> None:
        """Assign all requests to servers.

        Args:
            servers: Server numbers, in the same order on every rank.
            prompt_ids: Prompt number of each request. Requests are sent in the order of this mapping.
            prompt_tokens: Prompt length of each request. Default: 0.
            most_response_tokens: Maximum response length.
            homes: Server of each request that continues an answered prompt. The server receives all requests of the
                prompt.
        """
        self._servers = list(servers)
        self.owed = OwedTokens(servers, most_response_tokens)
        self._queues: dict[int, deque[_AssignedPrompt]] = {server: deque() for server in servers}
        self._tokens = {request: (prompt_tokens or {}).get(request, 0) for request in prompt_ids}
        self._home: dict[int, int] = {}
        """The last server of each request. Its cache contains the turns of the episode."""
        self._home_of_prompt: dict[int, int] = {}
        prompts = {number: _AssignedPrompt(number) for number in prompt_ids.values()}
        self._prompt_of = {request: prompts[number] for request, number in prompt_ids.items()}
        for request, prompt in self._prompt_of.items():
            prompt.waiting.append(request)
        new = list[_AssignedPrompt]()
        for prompt in prompts.values():
            home = (homes or {}).get(prompt.waiting[0])
            if home in self._queues:
                self._put_at_home(prompt, home)
            else:
                new.append(prompt)
        self._give(new, first=0)

    def add(self, request: int, prompt_id: int, prompt_tokens: int = 0) -> None:
        """Add a request. A later turn of an episode keeps its request number and goes to the server of the previous
        turn. The first turn of an episode goes to the server of the other episodes of its prompt."""
        last = self._home.get(request)
        home = last if last in self._queues else self._home_of_prompt.get(prompt_id)
        prompt = _AssignedPrompt(prompt_id, deque([request]), follows=last in self._queues)
        self._prompt_of[request], self._tokens[request] = prompt, prompt_tokens
        if home in self._queues:
            self._put_at_home(prompt, home)
        else:
            self._give([prompt], first=0)
        if (home := self._home.get(request)) is not None:
            _remember(self._home_of_prompt, prompt_id, home)

    @property
    def waiting(self) -> bool:
        """Whether any request waits for a server."""
        return any(self._queues.values())

    def take(self, server: int, most: int) -> list[int]:
        """Take at most `most` requests for a server. Takes fewer requests towards the end, and whole prompts if they
        fit."""
        hand, taken = self._queues[server], list[int]()
        # Take a quarter of the waiting requests. Groups shrink towards the end, so that servers finish together.
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
        """Remove answered requests, but store their server. `responses` has the number of tokens by request."""
        self.owed.answered(server, sum(self._tokens.pop(request) for request in responses), responses.values())
        for request in responses:
            del self._prompt_of[request]

    def relieve(self, server: int) -> bool:
        """Move a waiting prompt to a server with room. The prompt is a whole prompt of the server with the most
        outstanding tokens, or a turn of a server with far more outstanding tokens. Returns False if no waiting prompt
        can move."""
        donors = sorted((e for e in self._servers if e != server and self._queues[e]), key=lambda e: -self.owed.of(e))
        for donor in donors:
            far_busier = self.owed.of(donor) > FAR_BUSIER * self.owed.of(server)
            for prompt in reversed(self._queues[donor]):
                if not prompt.begun and (far_busier or not prompt.follows):
                    self._queues[donor].remove(prompt)
                    self.owed.add(donor, -self._prompt_tokens(prompt), -len(prompt.waiting))
                    self._put(prompt, server)
                    return True
        return False

    def lose(self, server: int, owed: Iterable[int]) -> None:
        """Remove a failed server and assign its unanswered and waiting requests to the other servers."""
        lost = {id(prompt): prompt for prompt in self._queues.pop(server)}
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

    def _give(self, prompts: Iterable[_AssignedPrompt], first: int) -> None:
        """Assign one prompt to each server in turn, starting at position `first`. The quotient numbers the prompts of
        a server, so that a later assignment is even too.

        The numbers determine how many prompts each server receives. The rank chooses the prompts of each server: the
        largest prompt first, to the server with the fewest outstanding tokens.
        """
        count, cards = len(self._servers), dict[int, deque[int]]()
        if not count:
            return  # the caller handles the remaining requests
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

    def _put_at_home(self, prompt: _AssignedPrompt, server: int) -> None:
        prompt.number //= len(self._servers)
        self._put(prompt, server)

    def _put(self, prompt: _AssignedPrompt, server: int) -> None:
        self._queues[server].append(prompt)
        self.owed.add(server, self._prompt_tokens(prompt), len(prompt.waiting))
        for request in prompt.waiting:
            _remember(self._home, request, server)

    def _prompt_tokens(self, prompt: _AssignedPrompt) -> int:
        return sum(self._tokens[request] for request in prompt.waiting)


def _remember(homes: dict[int, int], number: int, server: int) -> None:
    homes.pop(number, None)
    homes[number] = server
    if len(homes) > _MOST_HOMES:
        del homes[next(iter(homes))]
