"""What each server has still to do, in tokens, as far as one rank knows: what the servers are filled by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class _Debt:
    prompt_tokens: int = 0
    sequences: int = 0


class OwedTokens:
    """By server, of the requests that wait for it or are with it: the tokens of their prompts, and for each response
    those that it will have in the mean of the responses so far, or before there is one as many as it may have."""

    def __init__(self, servers: Iterable[int], most_response_tokens: int) -> None:
        self._debts = {server: _Debt() for server in servers}
        self._most = most_response_tokens
        self._responses = self._response_tokens = 0

    @property
    def response_tokens(self) -> float:
        """What a response is expected to have."""
        return self._response_tokens / self._responses if self._responses else float(self._most)

    def worth(self, prompt_tokens: int, sequences: int) -> float:
        """Tokens of so many requests, whose prompts have so many together."""
        return prompt_tokens + sequences * self.response_tokens

    def of(self, server: int) -> float:
        """What it owes."""
        debt = self._debts[server]
        return self.worth(debt.prompt_tokens, debt.sequences)

    def add(self, server: int, prompt_tokens: int, sequences: int) -> None:
        """It owes so many requests more, or fewer where the numbers are negative."""
        debt = self._debts[server]
        debt.prompt_tokens += prompt_tokens
        debt.sequences += sequences

    def answered(self, server: int, prompt_tokens: int, responses: Iterable[int]) -> None:
        """It has given responses of so many tokens each."""
        lengths = list(responses)
        self.add(server, -prompt_tokens, -len(lengths))
        self._responses += len(lengths)
        self._response_tokens += sum(lengths)

    def lose(self, server: int) -> None:
        """It owes nothing any more; what it owed is added to others."""
        del self._debts[server]
