"""Assign requests to servers. The module does not use the network, so a test can simulate all ranks of a large run.

Prompts are numbered over all ranks and dealt to servers by number. Ranks therefore exchange no messages, and servers
receive equal numbers of prompts even if a rank has few prompts. The prompt numbers of a rank determine the number of
its prompts for each server. The rank then chooses the prompts of each server to balance the outstanding tokens. All
samples of a prompt go to one server, whose prefix cache computes the prompt once. All turns of an episode go to one
server too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from megappo.engines.protocol import GenerateRequest
from megappo.engines.sglang.requests.owing import OwedTokens

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

    def __init__(self, servers: Iterable[int]) -> None:
        """Create an assignment without requests. `servers` must have the same order on every rank."""
        self._servers = list(servers)
        self.owed = OwedTokens(self._servers)
        self._queues: dict[int, deque[_AssignedPrompt]] = {server: deque() for server in self._servers}
        self._requests: dict[int, GenerateRequest] = {}
        self._prompt_of: dict[int, _AssignedPrompt] = {}
        self._without_server: list[_AssignedPrompt] = []
        """Prompts that wait because all servers have failed."""
        self._server_of_conversation: dict[int, int] = {}
        """The last server of each episode. Its cache contains the turns of the episode."""
        self._server_of_prompt: dict[int, tuple[tuple[int, ...], int]] = {}
        """Beginning and server of each prompt. Prompt numbers repeat, so a number alone does not identify a prompt.
        The whole text does not identify a prompt either if a long response is generated in pieces
        (`rollout.generation`)."""

    def add(self, requests: Mapping[int, GenerateRequest], most_response_tokens: int = 1) -> None:
        """Assign requests for responses of at most `most_response_tokens` tokens to servers.

        A later turn of an episode goes to the server of the previous turn. A request that continues a known prompt
        goes to the server of the prompt.
        """
        self._requests |= requests
        self.owed.most_response_tokens = max(self.owed.most_response_tokens, most_response_tokens)
        prompts: dict[tuple[int, int | None], _AssignedPrompt] = {}
        turns: list[tuple[_AssignedPrompt, int]] = []
        # Send the longest prompts first, so that no long prompt remains at the end.
        for number in sorted(requests, key=lambda n: -len(requests[n].token_ids)):
            request = requests[number]
            last = self._server_of_conversation.get(request.conversation) if request.conversation is not None else None
            if last in self._queues:
                prompt = _AssignedPrompt(request.prompt_id, follows=True)
                turns.append((prompt, last))
            else:
                key = (request.prompt_id, self._known_server(request))
                prompt = prompts.setdefault(key, _AssignedPrompt(request.prompt_id))
            prompt.waiting.append(number)
            self._prompt_of[number] = prompt
        known = [(prompt, server) for (_, server), prompt in prompts.items() if server is not None]
        for prompt, server in (*turns, *known):
            prompt.number //= len(self._servers)
            self._put(prompt, server)
        self._deal((prompt for (_, server), prompt in prompts.items() if server is None), first=0)

    def add_servers(self, servers: Iterable[int]) -> None:
        """Add servers that have started again, and assign the requests without a server."""
        for server in servers:
            self._servers.append(server)
            self._queues[server] = deque()
            self.owed.add_server(server)
        self._servers.sort()
        waiting, self._without_server = self._without_server, []
        self._deal(waiting, first=0)

    def forget_prefixes(self) -> None:
        """Remove the servers of prompts, because new weights have invalidated the caches."""
        self._server_of_prompt = {}

    def _known_server(self, request: GenerateRequest) -> int | None:
        """Return the server with a beginning of the prompt in its cache, or None."""
        beginning, server = self._server_of_prompt.get(request.prompt_id, ((), None))
        return server if server in self._queues and request.token_ids[: len(beginning)] == beginning else None

    @property
    def waiting(self) -> bool:
        """Whether any request waits for a server."""
        return any(self._queues.values())

    def take(self, server: int, most: int) -> list[int]:
        """Take at most `most` requests for a server, and all samples of a prompt together if they fit."""
        prompts, taken = self._queues[server], list[int]()
        while prompts and len(taken) < most:
            prompt = prompts[0]
            if taken and len(taken) + len(prompt.waiting) > most:
                break
            prompt.begun = True
            taken += [prompt.waiting.popleft() for _ in range(min(most - len(taken), len(prompt.waiting)))]
            if not prompt.waiting:
                prompts.popleft()
        return taken

    def answered(self, server: int, responses: Mapping[int, int]) -> None:
        """Remove answered requests, but store their server. `responses` has the number of tokens by request."""
        self.owed.answered(server, sum(len(self._requests[n].token_ids) for n in responses), responses.values())
        for number in responses:
            del self._prompt_of[number], self._requests[number]

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
        self._deal(lost.values(), first=position)

    def _deal(self, prompts: Iterable[_AssignedPrompt], first: int) -> None:
        """Assign one prompt to each server in turn, starting at position `first`. The quotient numbers the prompts of
        a server, so that a later assignment is even too.

        The numbers determine how many prompts each server receives. The rank chooses the prompts of each server: the
        largest prompt first, to the server with the fewest outstanding tokens.
        """
        count, cards, dealt = len(self._servers), dict[int, deque[int]](), list(prompts)
        if not count:
            self._without_server += dealt
            return
        for prompt in dealt:
            server = self._servers[(first + prompt.number) % count]
            cards.setdefault(server, deque()).append(prompt.number // count)
        for prompt in sorted(dealt, key=lambda p: -self.owed.worth(self._prompt_tokens(p), len(p.waiting))):
            server = min(cards, key=self.owed.of)
            prompt.number = cards[server].popleft()
            if not cards[server]:
                del cards[server]
            self._put(prompt, server)

    def _put(self, prompt: _AssignedPrompt, server: int) -> None:
        self._queues[server].append(prompt)
        self.owed.add(server, self._prompt_tokens(prompt), len(prompt.waiting))
        for number in prompt.waiting:
            request = self._requests[number]
            if request.conversation is not None:
                _remember(self._server_of_conversation, request.conversation, server)
            known = self._server_of_prompt.get(request.prompt_id, (request.token_ids, server))[0]
            beginning = known if request.token_ids[: len(known)] == known else request.token_ids
            _remember(self._server_of_prompt, request.prompt_id, (beginning, server))

    def _prompt_tokens(self, prompt: _AssignedPrompt) -> int:
        return sum(len(self._requests[number].token_ids) for number in prompt.waiting)


_Value = TypeVar("_Value")


def _remember(servers: dict[int, _Value], number: int, value: _Value) -> None:
    servers.pop(number, None)
    servers[number] = value
    if len(servers) > _MOST_HOMES:
        del servers[next(iter(servers))]
