"""A round that is never over: requests come at any time, answers are taken at any time, and all of it can be broken
off, with the tokens that there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import aiohttp

from megappo.config.engine import SGLangSettings
from megappo.engines.protocol import Completion, GenerateRequest, Listener, SamplingParams
from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.engines.sglang.dispatch import Outcome
from megappo.engines.sglang.streaming import OpenRound
from megappo.runtime.objects import all_gather_objects
from megappo.runtime.waiting import wait_until

_ABORT_SECONDS = 0.1
"""Between two calls to abort: a request that was on its way during the first is met by the second."""


class _Inbox:
    """A `Listener`: answers that nobody has taken yet."""

    def __init__(self) -> None:
        self._found: dict[int, Completion] = {}
        self._lock = threading.Lock()
        self._bell = threading.Event()

    def answered(self, number: int, completion: Completion) -> None:
        """From the round's thread."""
        with self._lock:
            self._found[number] = completion
            self._bell.set()

    def take(self, wait_seconds: float) -> dict[int, Completion]:
        """Those that there are; waits at most so long for the first."""
        self._bell.wait(wait_seconds)
        with self._lock:
            found, self._found = self._found, {}
            self._bell.clear()
        return found


class _Relay:
    """A `Listener`: notes who is owed nothing any more, and hands the answer on."""

    def __init__(self, listener: Listener, owed: set[int]) -> None:
        self._listener, self._owed = listener, owed

    def answered(self, number: int, completion: Completion) -> None:
        """From the round's thread."""
        self._owed.discard(number)  # before the next turn is asked for, under the same number
        self._listener.answered(number, completion)


class InFlightRound(OpenRound):
    """What one version of the weights answers, of this rank's requests."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        params: SamplingParams,
        version: int,
        settings: SGLangSettings,
        on_tokens: Callable[[], None] = lambda: None,
        listener: Listener | None = None,
    ) -> None:
        """`listener`: who is told answers at once, in place of `take`."""
        self._inbox = _Inbox()
        self._owed: set[int] = set()
        told = self._inbox if listener is None else _Relay(listener, self._owed)
        super().__init__(endpoints, told, params, version, settings, on_tokens)

    def send(self, number: int, request: GenerateRequest) -> None:
        """See `RequestStream.send`."""
        self._owed.add(number)
        super().send(number, request)

    def take(self, wait_seconds: float) -> dict[int, Completion]:
        """The answers that nobody has taken yet; see `_Inbox.take`."""
        found = self._inbox.take(0.0 if self.is_over else wait_seconds)
        self._owed.difference_update(found)
        return found

    @property
    def failures(self) -> dict[int, str]:
        """Servers that failed until now, and how. Raises what nobody expected."""
        if self._finished.done():
            self._finished.result()
        return dict(self._outcome.failures)

    @property
    def refusal(self) -> str | None:
        """A request that a server will never take."""
        return self._outcome.refusal

    def break_off(self) -> None:
        """Send out nothing any more, and let answers be broken off."""
        self._aborts = True

    def hold(self) -> None:
        """Servers make no tokens from now on."""
        self._is_held = True

    @contextmanager
    def given(self, version: int) -> Iterator[None]:
        """While servers are given these weights, of which they make tokens as soon as they have them; what they have
        begun has tokens of older ones."""
        self._version = version
        yield
        self._is_held = False

    @property
    def busy(self) -> list[Endpoint]:
        """Servers that owe answers."""
        return [lane.endpoint for lane in list(self._lanes) if lane.calls]

    def end(self) -> tuple[dict[int, Completion], Outcome]:
        """The answers that nobody has taken yet, with what is owed as broken off without a token; and what else is
        known of the round."""
        outcome = self.hang_up()
        found = self.take(0.0)
        nothing = Completion((), (), truncated=False, weight_version=self._version, broken_off=True)
        return found | dict.fromkeys(self._owed, nothing), outcome

    def _hand_out(self, session: aiohttp.ClientSession) -> None:
        if not self._aborts:
            super()._hand_out(session)


class Departures:
    """Sends requests over the round that there is, from any thread, and keeps them back while there can be none."""

    def __init__(self) -> None:
        self.stream: InFlightRound | None = None
        """Where this rank has sent requests since weights were given last."""
        self.listener: Listener | None = None
        """Who is told answers at once."""
        self._lock = threading.Lock()
        self._kept: list[Callable[[], None]] | None = None

    def send(self, requests: Mapping[int, GenerateRequest], begin: Callable[[], InFlightRound]) -> None:
        """Send requests; `begin` makes the round where there is none."""
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
        """The round, which is no more the one that requests are sent over."""
        with self._lock:
            stream, self.stream = self.stream, None
            return stream

    @contextmanager
    def kept_back(self) -> Iterator[None]:
        """Servers are started again meanwhile."""
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
    """Have all servers give up all that they have begun, until no rank is owed anything; every rank calls it.

    Args:
        stream: of this rank, which is broken off.
        mine: the servers that this rank tells.

    Returns what went wrong, by server, the same on every rank.
    """
    failed, quiet = dict[int, str](), 0
    deadline = time.monotonic() + settings.sync_timeout_seconds
    while True:
        for endpoint in mine:
            failed |= _abort(endpoint, settings) if endpoint.index not in failed else {}
        owing = [] if stream is None else [endpoint for endpoint in stream.busy if endpoint.index not in failed]
        if time.monotonic() > deadline:
            failed |= {e.index: f"{e.name} gave nothing back when it was told to give up" for e in owing}
        facts = all_gather_objects((failed, len(owing)))
        failed = {index: reason for of_rank, _ in facts for index, reason in of_rank.items()}
        quiet = 0 if any(count for _, count in facts) else quiet + 1
        if quiet == 2:  # what was being sent during the first is seen by then
            return failed
        wait_until(lambda: stream is None or not stream.busy, _ABORT_SECONDS, every_seconds=_ABORT_SECONDS / 10)


def pause_servers(mine: Sequence[Endpoint], settings: SGLangSettings) -> dict[int, str]:
    """Have these servers keep what they have begun and make no tokens; what went wrong, by server."""
    failed = dict[int, str]()
    for endpoint in mine:
        try:
            call(endpoint, "/pause_generation", {"mode": settings.pause}, timeout_seconds=settings.sync_timeout_seconds)
        except ServerFailure as failure:
            failed[endpoint.index] = str(failure)
    return failed


def _abort(endpoint: Endpoint, settings: SGLangSettings) -> dict[int, str]:
    try:
        call(endpoint, "/abort_request", {"abort_all": True}, timeout_seconds=settings.health_timeout_seconds)
    except ServerFailure as failure:
        return {endpoint.index: str(failure)}
    return {}
