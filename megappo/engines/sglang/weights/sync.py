"""One weight sync of the servers that this rank manages or feeds: session, buckets and verification.

While a server loads bucket k, bucket k + 1 is gathered into the second of two buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.engines.sglang.weights.fingerprint import Fingerprints, differing
from megappo.engines.sglang.weights.transport import Loaded, Transport
from megappo.errors import first_of
from megappo.files.json_values import JSONValue
from megappo.reshard.slices import EngineShape, Receiver
from megappo.runtime.device import thread_pool
from megappo.runtime.ranks.objects import receive_object, send_object


@dataclass
class SyncSeconds:
    """Seconds of an attempt on this rank by phase. `gather` includes the conversion and the
    wait for other ranks and for the device."""

    gather: float = 0.0
    load: float = 0.0
    """Wait for servers to load buckets, without the part that overlaps with gathering."""
    verify: float = 0.0
    session: float = 0.0
    wake: float = 0.0
    """Time before and after the transfer. Trainers release memory. Servers start if necessary and allocate memory."""

    @property
    def transfer(self) -> float:
        """Seconds of the phases that move weights."""
        return self.gather + self.load

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the duration of the context to a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + time.monotonic() - started)


@dataclass
class ServerSync:
    """State of the sync of one server, on a rank that manages or feeds the server."""

    endpoint: Endpoint
    transport: Transport
    receivers: Sequence[Receiver]
    """Receivers of the weights that feed the server."""
    rank: int
    """This rank."""
    problem: str | None = None
    """Reason why the sync of this server failed, or None. After a failure no more data is sent to the server."""
    loading: Future[None] | None = None
    expected: dict[tuple[int, str], str] = field(default_factory=dict)
    """Fingerprints of the sent tensors, by engine rank and name."""

    @property
    def is_own(self) -> bool:
        """Whether this rank manages the server. The managing rank opens the session, compares the fingerprints, and
        sets the version."""
        return self.rank == self.endpoint.sender

    @property
    def others(self) -> list[int]:
        """Other ranks that feed the server."""
        return [rank for rank in dict.fromkeys(r.rank for r in self.receivers) if rank != self.endpoint.sender]

    def step(self, action: Callable[[], object]) -> None:
        """Run an action unless the sync of this server has failed. A failure is stored."""
        if self.problem is None:
            try:
                action()
            except ServerFailure as failure:
                self.problem = str(failure)

    def settle(self) -> None:
        """Wait until the current bucket is loaded."""
        if self.loading is not None:
            loading, self.loading = self.loading, None
            self.step(loading.result)


@dataclass
class SyncRun:
    """A sync of several servers from the buffers of this rank."""

    servers: Sequence[ServerSync]
    """Servers in the same order on all ranks. Objects between two ranks are matched by this order."""
    shape: EngineShape
    timeout_seconds: float
    verify: bool
    seconds: SyncSeconds
    """Timings that this sync adds to."""
    pause: str = "abort"
    """Treatment of unfinished requests during the sync: `rollout.servers.pause`."""
    _expected: list[Future[dict[tuple[int, str], str]]] = field(default_factory=list)
    _fingerprints: dict[Receiver, Fingerprints] = field(default_factory=dict)
    _in_use: Loaded = ()

    def __post_init__(self) -> None:
        self._pool = thread_pool(2 * len(self.servers) + 1, "megappo-sync")

    @property
    def problems(self) -> dict[int, str]:
        """Problems on this rank so far, by server."""
        return {server.endpoint.index: server.problem for server in self.servers if server.problem}

    def begin(self) -> None:
        """Open a session on each server of this rank. A session of an interrupted sync is closed first."""
        with self.seconds.timed("session"):
            self._on_own(self._open)

    def give_up(self, problems: Mapping[int, str]) -> None:
        """Mark these servers as failed. No more data is sent to these servers."""
        for server in self.servers:
            server.problem = server.problem or problems.get(server.endpoint.index)

    def _open(self, server: ServerSync) -> None:
        with suppress(ServerFailure):
            self._call(server, "/end_weight_update")  # answers "no session is open" unless a sync was interrupted
        self._call(server, "/begin_weight_update")  # SGLang 0.5.23 rejects weights outside of a session

    def load(self, payloads: Loaded) -> None:
        """Start to load the payloads of a bucket on this rank. Their memory is free after the next bucket has settled
        and is loading."""
        for server in self.servers:
            parts = {(receiver.part, receiver.stage) for receiver in server.receivers if receiver.rank == server.rank}
            own = [entry for entry in payloads if (entry[0].receiver.part, entry[0].receiver.stage) in parts]
            work = server.transport.prepare(own, server.others) if own else None
            if work is not None and server.problem is None:
                server.loading = self._pool.submit(work)
        self._in_use = payloads
        for payload, flat_bytes in payloads if self.verify and self.servers else ():
            receiver, tensors = payload.receiver, payload.tensors(flat_bytes)
            if receiver not in self._fingerprints:
                rank = receiver.tensor_rank if receiver.tp > 1 else None
                self._fingerprints[receiver] = Fingerprints(self.shape, rank)
            compute = self._fingerprints[receiver].of_bucket
            self._expected.append(self._pool.submit(compute, payload.parameters, tensors))

    def settle(self) -> None:
        """Wait until this rank loads no more data."""
        with self.seconds.timed("load"):
            for server in self.servers:
                server.settle()
        with self.seconds.timed("verify"):
            for expected in self._expected:
                expected.result()

    def finish(self, version: int) -> None:
        """Close the sessions, compare the fingerprints, and only then set the new version of the servers."""
        self.settle()
        self._report()
        with self.seconds.timed("session"):
            self._on_own(lambda server: self._call(server, "/end_weight_update"))
        if self.verify:
            with self.seconds.timed("verify"):
                self._on_own(self._verify)
        with self.seconds.timed("session"):
            if self.pause != "in_place":  # in_place intentionally keeps keys and values of older weights
                # A paused server counts as idle immediately, and does not check again while a flush waits.
                flush = "/flush_cache" if self.pause == "retract" else "/flush_cache?timeout=10"
                self._on_own(lambda server: self._call(server, flush))
            news: dict[str, JSONValue] = {"new_version": str(version), "abort_all_requests": False}
            self._on_own(lambda server: self._call(server, "/update_weight_version", news))
            if self.pause != "abort":  # only now, because SGLang assigns tokens to versions when the version is set
                self._on_own(lambda server: self._call(server, "/continue_generation"))
        self._pool.shutdown()

    def _report(self) -> None:
        """Send problems and fingerprints from the ranks that feed a server to the rank that manages the server."""
        mine = {key: value for part in self._expected for key, value in part.result().items()}
        for server in self.servers:
            if server.is_own:
                server.expected = dict(mine)
                for problem, expected in [receive_object(rank) for rank in server.others]:
                    server.problem = server.problem or problem
                    server.expected |= expected
            else:
                send_object((server.problem, mine), server.endpoint.sender)

    def _verify(self, server: ServerSync) -> None:
        # SGLang only logs unknown tensors and reports success (0.5.23, models/llama.py:779). Only checksums verify
        # the received weights.
        answer = self._call(server, "/weights_checker", {"action": "checksum"})
        actual = {
            (place["tp_rank"], name): value
            for rank in answer["ranks"]
            for place in rank["parallelism_info"]
            for name, value in rank["checksums"].items()
        }
        wrong = differing(server.expected, actual)
        if wrong:
            raise ServerFailure(
                f"{server.endpoint.name} has weights that differ from the sent weights: {first_of(wrong, 5)}"
            )

    def _call(self, server: ServerSync, path: str, body: Mapping[str, JSONValue] | None = None) -> dict[str, Any]:
        return call(server.endpoint, path, body, timeout_seconds=self.timeout_seconds)

    def _on_own(self, action: Callable[[ServerSync], object]) -> None:
        jobs = [self._pool.submit(server.step, partial(action, server)) for server in self.servers if server.is_own]
        for job in jobs:
            job.result()
