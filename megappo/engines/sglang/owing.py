"""Estimates the tokens that each server still owes one rank, by which requests are assigned."""

from __future__ import annotations

from collections.abc import Iterable


class OwedTokens:
    """Owed tokens by server, over the requests that wait for it or were sent to it. A request counts its prompt tokens
    and an expected response: the mean of the responses so far, or before the first the limit."""

    def __init__(self, servers: Iterable[int], most_response_tokens: int) -> None:
        self._sequences = dict.fromkeys(servers, 0)
        self._prompt_tokens = dict(self._sequences)
        self._most = most_response_tokens
        self._responses = self._response_tokens = 0

    @property
    def response_tokens(self) -> float:
        """Expected number of tokens of a response."""
        return self._response_tokens / self._responses if self._responses else float(self._most)

    def worth(self, prompt_tokens: int, sequences: int) -> float:
        """Owed tokens of `sequences` requests, whose prompts have `prompt_tokens` together."""
        return prompt_tokens + sequences * self.response_tokens

    def of(self, server: int) -> float:
        """Tokens that a server owes."""
        return self.worth(self._prompt_tokens[server], self._sequences[server])

    def add(self, server: int, prompt_tokens: int, sequences: int) -> None:
        """Add requests to a server, or remove them where the numbers are negative."""
        self._prompt_tokens[server] += prompt_tokens
        self._sequences[server] += sequences

    def answered(self, server: int, prompt_tokens: int, responses: Iterable[int]) -> None:
        """Note responses of a server, each by its number of tokens."""
        lengths = list(responses)
        self.add(server, -prompt_tokens, -len(lengths))
        self._responses += len(lengths)
        self._response_tokens += sum(lengths)

    def lose(self, server: int) -> None:
        """Remove a server; its requests are added to others by the caller."""
        del self._prompt_tokens[server], self._sequences[server]
