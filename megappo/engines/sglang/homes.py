"""Remembers which server has the beginning of a prompt in its cache, from one round of requests to the next."""

from __future__ import annotations

from collections.abc import Mapping

from megappo.engines.protocol import GenerateRequest


class Homes:
    """The server of each prompt, by the prompt's number and beginning. Numbers count from 0 in every round, so that a
    number alone does not identify a prompt; nor does the text where a long answer is generated piece by piece
    (`rollout.generation`)."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[tuple[int, ...], int]] = {}

    def of(self, requests: Mapping[int, GenerateRequest]) -> dict[int, int]:
        """The server of each request that continues a prompt which a server has answered."""
        return {i: server for i, request in requests.items() if (server := self._of(request)) is not None}

    def _of(self, request: GenerateRequest) -> int | None:
        beginning, server = self._found.get(request.prompt_id, ((), None))
        return server if request.token_ids[: len(beginning)] == beginning else None

    def note(self, request: GenerateRequest, server: int) -> None:
        """Note which server has answered a request."""
        is_known = self._of(request) is not None
        beginning = self._found[request.prompt_id][0] if is_known else request.token_ids
        self._found[request.prompt_id] = (beginning, server)

    def forget(self) -> None:
        """Forget all servers: new weights have emptied their caches."""
        self._found = {}
