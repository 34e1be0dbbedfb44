"""Estimate the outstanding tokens of each server for one rank. Requests are assigned by this estimate."""

from __future__ import annotations

from collections.abc import Iterable


class OwedTokens:
    """Outstanding tokens by server, over its waiting and sent requests. A request counts its prompt tokens and an
    expected response length. The expected length is the mean of the responses so far, initially the limit."""

    def __init__(self, servers: Iterable[int]) -> None:
        self._sequences = dict.fromkeys(servers, 0)
        self._prompt_tokens = dict(self._sequences)
        self.most_response_tokens = 1
        self._responses = self._response_tokens = 0

    @property
    def response_tokens(self) -> float:
        """Expected number of tokens of a response."""
        return self._response_tokens / self._responses if self._responses else float(self.most_response_tokens)

    def worth(self, prompt_tokens: int, sequences: int) -> float:
        """Return the expected tokens of `sequences` requests with `prompt_tokens` prompt tokens in total."""
        return prompt_tokens + sequences * self.response_tokens

    def of(self, server: int) -> float:
        """Return the outstanding tokens of a server."""
        return self.worth(self._prompt_tokens[server], self._sequences[server])

    def add(self, server: int, prompt_tokens: int, sequences: int) -> None:
        """Add requests to a server. Negative numbers remove requests."""
        self._prompt_tokens[server] += prompt_tokens
        self._sequences[server] += sequences

    def answered(self, server: int, prompt_tokens: int, responses: Iterable[int]) -> None:
        """Record responses of a server by number of tokens."""
        lengths = list(responses)
        self.add(server, -prompt_tokens, -len(lengths))
        self._responses += len(lengths)
        self._response_tokens += sum(lengths)

    def add_server(self, server: int) -> None:
        """Add a server without requests."""
        self._prompt_tokens[server] = self._sequences[server] = 0

    def lose(self, server: int) -> None:
        """Remove a server. The caller assigns its requests to other servers."""
        del self._prompt_tokens[server], self._sequences[server]
