"""Which server has the beginning of a prompt in its cache, from one round of requests to the next."""

from __future__ import annotations

from collections.abc import Mapping

from megappo.engines.protocol import GenerateRequest


class Homes:
    """By the numbers of prompts, which count from 0 in every round: a number alone does not say that it is the same
    prompt, nor does its text where a long answer is asked for piece by piece (`rollout.generation`)."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[tuple[int, ...], int]] = {}

    def of(self, requests: Mapping[int, GenerateRequest]) -> dict[int, int]:
        """The server of each request that goes on from what one has answered."""
        return {i: server for i, request in requests.items() if (server := self._of(request)) is not None}

    def _of(self, request: GenerateRequest) -> int | None:
        beginning, server = self._found.get(request.prompt_id, ((), None))
        return server if request.token_ids[: len(beginning)] == beginning else None

    def note(self, request: GenerateRequest, server: int) -> None:
        """A server has answered it."""
        is_known = self._of(request) is not None
        beginning = self._found[request.prompt_id][0] if is_known else request.token_ids
        self._found[request.prompt_id] = (beginning, server)

    def forget(self) -> None:
        """The caches are empty: the weights are others."""
        self._found = {}
