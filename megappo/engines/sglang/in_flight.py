"""A round without a fixed end. Requests may be sent and answers may be taken at any time. All requests can be
interrupted, with the tokens generated so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import aiohttp

from megappo.config.engine import SGLangSettings
from megappo.engines.protocol import Completion, GenerateRequest, Listener, SamplingParams
from megappo.engines.sglang.client import Endpoint, failures_of
from megappo.engines.sglang.dispatch import Outcome, RoundLimits
from megappo.engines.sglang.streaming import OpenRound
from megappo.runtime.objects import all_gather_objects
from megappo.runtime.waiting import wait_until

_ABORT_SECONDS = 0.1
"""Seconds between two abort calls. The second call reaches requests that were in transit during the first call."""


class _Inbox:
    """A `Listener` that collects answers until `take`."""

    def __init__(self) -> None:
        self._found: dict[int, Completion] = {}
        self._lock = threading.Lock()
        self._bell = threading.Event()

    def answered(self, number: int, completion: Completion) -> None:
        """Store an answer. Called from the thread of the round."""
        with self._lock:
            self._found[number] = completion
            self._bell.set()

    def take(self, wait_seconds: float) -> dict[int, Completion]:
        """Return the new answers. Waits at most `wait_seconds` for the first answer."""
        self._bell.wait(wait_seconds)
        with self._lock:
            found, self._found = self._found, {}
            self._bell.clear()
        return found


class _Relay:
    """A `Listener` that records answered requests and forwards each answer."""

    def __init__(self, listener: Listener, owed: set[int]) -> None:
        self._listener, self._owed = listener, owed

    def answered(self, number: int, completion: Completion) -> None:
        """Record the answer and forward the answer. Called from the thread of the round."""
        self._owed.discard(number)  # first, because the listener may send the next turn under the same number
        self._listener.answered(number, completion)


class InFlightRound(OpenRound):
    """The requests of this rank in flight under one weight version."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        params: SamplingParams,
        version: int,
        limits: RoundLimits,
        on_tokens: Callable[[], None] = lambda: None,
        listener: Listener | None = None,
    ) -> None:
        """Start the round. `listener` receives answers immediately. Without a listener, `take` returns the answers."""
        self._inbox = _Inbox()
        self._owed: set[int] = set()
        told = self._inbox if listener is None else _Relay(listener, self._owed)
        super().__init__(endpoints, told, params, version, limits, on_tokens)

    def send(self, number: int, request: GenerateRequest) -> None:
        """See `RequestStream.send`."""
        self._owed.add(number)
        super().send(number, request)

    def take(self, wait_seconds: float) -> dict[int, Completion]:
        """Return the new answers. See `_Inbox.take`."""
        found = self._inbox.take(0.0 if self.is_over else wait_seconds)
        self._owed.difference_update(found)
        return found

    @property
    def failures(self) -> dict[int, str]:
        """Reasons of failed servers, by server. Raises the exception that ended the thread of the round, if any."""
        if self._finished.done():
            self._finished.result()
        return dict(self._outcome.failures)

    @property
    def refusal(self) -> str | None:
        """Error of a request that every server would reject, or None."""
        return self._outcome.refusal

    def break_off(self) -> None:
        """Stop sending requests, and accept interrupted answers."""
        self._aborts = True

    def hold(self) -> None:
        """Mark the servers as paused."""
        self._is_held = True

    @contextmanager
    def given(self, version: int) -> Iterator[None]:
        """Context of a weight update to this version. Servers generate as soon as they have the weights. Earlier
        requests then contain tokens of older versions."""
        self._version = version
        yield
        self._is_held = False

    @property
    def busy(self) -> list[Endpoint]:
        """Servers with unanswered requests. Empty after the end of the round, for example after a rejected request."""
        return [] if self.is_over else [lane.endpoint for lane in list(self._lanes) if lane.calls]

    def end(self) -> tuple[dict[int, Completion], Outcome]:
        """End the round. Returns the new answers and the outcome of the round. Unanswered requests are returned as
        interrupted, without tokens."""
        outcome = self.hang_up()
        found = self.take(0.0)
        nothing = Completion((), (), truncated=False, weight_version=self._version, broken_off=True)
        return found | dict.fromkeys(self._owed, nothing), outcome

    def _hand_out(self, session: aiohttp.ClientSession) -> None:
        if not self._aborts:
            super()._hand_out(session)


class Departures:
    """Queue that sends requests over the current round from any thread, and stores requests while no round is
    possible."""

    def __init__(self) -> None:
        self.stream: InFlightRound | None = None
        """Round for requests since the last weight update, or None before the first request."""
        self.listener: Listener | None = None
        """Receiver of each answer, or None to collect answers."""
        self._lock = threading.Lock()
        self._kept: list[Callable[[], None]] | None = None

    def send(self, requests: Mapping[int, GenerateRequest], begin: Callable[[], InFlightRound]) -> None:
        """Send requests. If there is no round, `begin` creates a round."""
        with self._lock:
            if self._kept is not None:
                self._kept.append(lambda: self.send(requests, begin))
                return
            if self.stream is None:
                self.stream = begin()
            for number, request in requests.items():
                self.stream.send(number, request)

    def hold(self) -> None:
        """See `InFlightRound.hold`."""
        if self.stream is not None:
            self.stream.hold()

    def given(self, version: int) -> AbstractContextManager[None]:
        """See `InFlightRound.given`."""
        return nullcontext() if self.stream is None else self.stream.given(version)

    def take_stream(self) -> InFlightRound | None:
        """Detach and return the current round. Later requests begin a new round."""
        with self._lock:
            stream, self.stream = self.stream, None
            return stream

    @contextmanager
    def kept_back(self) -> Iterator[None]:
        """Context of a server restart. Requests are stored and sent after the restart."""
        with self._lock:
            self._kept = []
        try:
            yield
        finally:
            with self._lock:
                kept, self._kept = self._kept or [], None
        for send in kept:
            send()


def abort_servers(stream: InFlightRound | None, mine: Sequence[Endpoint], settings: SGLangSettings) -> dict[int, str]:
    """Abort all requests on all servers until no rank waits for an answer. All ranks call this function.

    Args:
        stream: Interrupted round of this rank.
        mine: Servers to which this rank sends the abort.

    Returns the problems by server, the same on every rank.
    """
    failed, quiet = dict[int, str](), 0
    deadline = time.monotonic() + settings.sync_timeout_seconds
    while True:
        asked = [endpoint for endpoint in mine if endpoint.index not in failed]
        # /pause_generation with mode abort is not used, because SGLang then checks only once a second whether
        # requests are gone (SGLang 0.5.23, tokenizer_manager.py:2280).
        failed |= failures_of(asked, "/abort_request", {"abort_all": True}, settings.health_timeout_seconds)
        owing = [] if stream is None else [endpoint for endpoint in stream.busy if endpoint.index not in failed]
        if time.monotonic() > deadline:
            failed |= {e.index: f"{e.name} did not return its requests after an abort" for e in owing}
        facts = all_gather_objects((failed, len(owing)))
        failed = {index: reason for of_rank, _ in facts for index, reason in of_rank.items()}
        quiet = 0 if any(count for _, count in facts) else quiet + 1
        if quiet == 2:  # a request in transit during the first pass is visible in the second pass
            return failed
        wait_until(lambda: stream is None or not stream.busy, _ABORT_SECONDS, every_seconds=_ABORT_SECONDS / 10)
