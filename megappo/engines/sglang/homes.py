"""Store the server that has the beginning of each prompt in its cache, over several rounds of requests."""

from __future__ import annotations

from collections.abc import Mapping

from megappo.engines.protocol import GenerateRequest


class Homes:
    """The server of each prompt, by number and beginning of the prompt.

    Prompt numbers start from 0 in every round, so a number alone does not identify a prompt. The whole text does not
    identify a prompt either if a long answer is generated in pieces (`rollout.generation`).
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[tuple[int, ...], int]] = {}

    def of(self, requests: Mapping[int, GenerateRequest]) -> dict[int, int]:
        """Return the server of each request that continues a prompt of an answered request."""
        return {i: server for i, request in requests.items() if (server := self._of(request)) is not None}

    def _of(self, request: GenerateRequest) -> int | None:
        beginning, server = self._found.get(request.prompt_id, ((), None))
        return server if request.token_ids[: len(beginning)] == beginning else None

    def note(self, request: GenerateRequest, server: int) -> None:
        """Store the server that has answered a request."""
        is_known = self._of(request) is not None
        beginning = self._found[request.prompt_id][0] if is_known else request.token_ids
        self._found[request.prompt_id] = (beginning, server)

    def forget(self) -> None:
        """Remove all servers, because new weights have invalidated the caches."""
        self._found = {}
