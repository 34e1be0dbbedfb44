"""A round without an end: requests arrive and answers are taken at any time, and everything can be broken off with the
tokens that were made."""

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
"""Seconds between two calls to abort; a request that was on its way during the first is caught by the second."""


class _Inbox:
    """A `Listener` that collects answers until they are taken."""

    def __init__(self) -> None:
        self._found: dict[int, Completion] = {}
        self._lock = threading.Lock()
        self._bell = threading.Event()

    def answered(self, number: int, completion: Completion) -> None:
        """Take an answer, from the round's thread."""
        with self._lock:
            self._found[number] = completion
            self._bell.set()

    def take(self, wait_seconds: float) -> dict[int, Completion]:
        """The answers that were not taken yet; waits at most `wait_seconds` for the first."""
        self._bell.wait(wait_seconds)
        with self._lock:
            found, self._found = self._found, {}
            self._bell.clear()
        return found


class _Relay:
    """A `Listener` that notes which requests are answered and forwards each answer."""

    def __init__(self, listener: Listener, owed: set[int]) -> None:
        self._listener, self._owed = listener, owed

    def answered(self, number: int, completion: Completion) -> None:
        """Note the answer and forward it, from the round's thread."""
        self._owed.discard(number)  # first, as the listener may send the next turn under the same number
        self._listener.answered(number, completion)


class InFlightRound(OpenRound):
    """This rank's requests in flight under one version of the weights."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        params: SamplingParams,
        version: int,
        limits: RoundLimits,
        on_tokens: Callable[[], None] = lambda: None,
        listener: Listener | None = None,
    ) -> None:
        """`listener`: receives answers at once; without one, `take` returns them."""
        self._inbox = _Inbox()
        self._owed: set[int] = set()
        told = self._inbox if listener is None else _Relay(listener, self._owed)
        super().__init__(endpoints, told, params, version, limits, on_tokens)

    def send(self, number: int, request: GenerateRequest) -> None:
        """See `RequestStream.send`."""
        self._owed.add(number)
        super().send(number, request)

    def take(self, wait_seconds: float) -> dict[int, Completion]:
        """The answers that were not taken yet; see `_Inbox.take`."""
        found = self._inbox.take(0.0 if self.is_over else wait_seconds)
        self._owed.difference_update(found)
        return found

    @property
    def failures(self) -> dict[int, str]:
        """Reasons of servers that failed so far, by server. Raises what ended the round's thread unexpectedly."""
        if self._finished.done():
            self._finished.result()
        return dict(self._outcome.failures)

    @property
    def refusal(self) -> str | None:
        """Error of a request that no server will ever accept; None: there is none."""
        return self._outcome.refusal

    def break_off(self) -> None:
        """Send no more requests, and accept answers that were broken off."""
        self._aborts = True

    def hold(self) -> None:
        """Note that servers are paused from now on."""
        self._is_held = True

    @contextmanager
    def given(self, version: int) -> Iterator[None]:
        """Context in which servers are given weights of this version. They make tokens as soon as they have them; what
        they had begun has tokens of older versions."""
        self._version = version
        yield
        self._is_held = False

    @property
    def busy(self) -> list[Endpoint]:
        """Servers with unanswered requests; empty after the end of the round, which a refusal can cause."""
        return [] if self.is_over else [lane.endpoint for lane in list(self._lanes) if lane.calls]

    def end(self) -> tuple[dict[int, Completion], Outcome]:
        """End the round. Returns the answers that were not taken yet, with unanswered requests as broken off without
        tokens, and the outcome of the round."""
        outcome = self.hang_up()
        found = self.take(0.0)
        nothing = Completion((), (), truncated=False, weight_version=self._version, broken_off=True)
        return found | dict.fromkeys(self._owed, nothing), outcome

    def _hand_out(self, session: aiohttp.ClientSession) -> None:
        if not self._aborts:
            super()._hand_out(session)


class Departures:
    """Sends requests over the current round, from any thread, and keeps them back while there can be none."""

    def __init__(self) -> None:
        self.stream: InFlightRound | None = None
        """The round over which requests are sent since the last weight update; None: none was sent since."""
        self.listener: Listener | None = None
        """Receiver of answers, who gets each at once; None: answers are collected."""
        self._lock = threading.Lock()
        self._kept: list[Callable[[], None]] | None = None

    def send(self, requests: Mapping[int, GenerateRequest], begin: Callable[[], InFlightRound]) -> None:
        """Send requests; `begin` makes the round where there is none yet."""
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
        """Detach and return the current round; later requests begin another."""
        with self._lock:
            stream, self.stream = self.stream, None
            return stream

    @contextmanager
    def kept_back(self) -> Iterator[None]:
        """Context in which servers are restarted: requests are kept and sent afterwards."""
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
    """Have all servers abort all their requests, until no rank waits for an answer; every rank calls it.

    Args:
        stream: this rank's round, which was broken off.
        mine: the servers to which this rank sends the order.

    Returns the problems by server, the same on every rank.
    """
    failed, quiet = dict[int, str](), 0
    deadline = time.monotonic() + settings.sync_timeout_seconds
    while True:
        asked = [endpoint for endpoint in mine if endpoint.index not in failed]
        # Not /pause_generation with mode abort, which looks once a second whether requests are gone (SGLang 0.5.23,
        # tokenizer_manager.py:2280).
        failed |= failures_of(asked, "/abort_request", {"abort_all": True}, settings.health_timeout_seconds)
        owing = [] if stream is None else [endpoint for endpoint in stream.busy if endpoint.index not in failed]
        if time.monotonic() > deadline:
            failed |= {e.index: f"{e.name} gave nothing back when it was told to give up" for e in owing}
        facts = all_gather_objects((failed, len(owing)))
        failed = {index: reason for of_rank, _ in facts for index, reason in of_rank.items()}
        quiet = 0 if any(count for _, count in facts) else quiet + 1
        if quiet == 2:  # a request that was being sent during the first pass shows in the second
            return failed
        wait_until(lambda: stream is None or not stream.busy, _ABORT_SECONDS, every_seconds=_ABORT_SECONDS / 10)
