"""A round that accepts requests while it runs, for turns of episodes. Each turn is answered as soon as possible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from megappo.engines.protocol import Completion, GenerateRequest, Listener, SamplingParams
from megappo.engines.sglang.client import Endpoint
from megappo.engines.sglang.dispatch import Lane, Outcome, Round, RoundLimits


class OpenRound(Round):
    """A `RequestStream` to servers.

    Turns of an episode go to the server of the previous turn, whose prefix cache contains the earlier turns. Each
    turn has a separate call, because a group would wait for its longest answer.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        listener: Listener,
        params: SamplingParams,
        version: int,
        limits: RoundLimits,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener = listener
        self._bell: asyncio.Future[None] | None = None
        """Future that completes after a request was added."""
        super().__init__(endpoints, {}, params, version, limits, on_tokens)
        self._largest_group = 1

    def send(self, number: int, request: GenerateRequest) -> None:
        """See `RequestStream.send`."""
        self._loop.call_soon_threadsafe(self._add, number, request)

    @property
    def is_over(self) -> bool:
        """See `RequestStream.is_over`."""
        return self._finished.done()

    def hang_up(self) -> Outcome:
        """Cancel unanswered requests and return the outcome, including failed servers."""
        try:
            if self._finished.done():
                self._finished.result()  # raises the exception that ended the thread, if any
        finally:
            self.cancel()
        return self._outcome

    def _add(self, number: int, request: GenerateRequest) -> None:
        self._requests[number] = request
        self._assignment.add(number, request.prompt_id, len(request.token_ids))
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    @property
    def _is_done(self) -> bool:
        return not self._lanes

    def _news(self) -> list[asyncio.Future[None]]:
        if self._bell is None or self._bell.done():
            self._bell = self._loop.create_future()
        return [self._bell]

    def _take(self, lane: Lane, call: asyncio.Task[list[Completion]]) -> None:
        numbers = lane.calls[call]
        super()._take(lane, call)
        for number in numbers:
            completion = self._outcome.completions.pop(number, None)
            if completion is not None:
                del self._requests[number]  # the round may last for the whole run
                self._listener.answered(number, completion)
