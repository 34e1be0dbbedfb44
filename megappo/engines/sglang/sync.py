"""One weight sync of the servers that this rank sends to: session, buckets, verification.

While a server takes bucket k over, bucket k + 1 is gathered into the other of two buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.engines.sglang.transport import Transport
from megappo.errors import first_of
from megappo.reshard.fingerprint import EngineShape, Fingerprints, differing
from megappo.reshard.stream import Bucket
from megappo.runtime.device import thread_pool


@dataclass
class SyncSeconds:
    """Where the time of a sync went on this rank; `gather` includes the conversion and the wait for other ranks."""

    gather: float = 0.0
    load: float = 0.0
    """Waiting for servers to take buckets over, beyond what hid behind gathering."""
    verify: float = 0.0
    session: float = 0.0


@dataclass
class ServerSync:
    """The state of one server's sync."""

    endpoint: Endpoint
    transport: Transport
    problem: str | None = None
    """Why the sync of this server failed; no more buckets are sent to it then. None: it has not."""
    loading: Future[None] | None = None

    def step(self, action: Callable[[], object]) -> None:
        """Do something unless it failed already, and note where it fails."""
        if self.problem is None:
            try:
                action()
            except ServerFailure as failure:
                self.problem = str(failure)

    def settle(self) -> None:
        """Wait for the bucket that is being loaded."""
        if self.loading is not None:
            loading, self.loading = self.loading, None
            self.step(loading.result)


@dataclass
class SyncRun:
    """A sync of several servers from this rank's buffers."""

    servers: Sequence[ServerSync]
    shape: EngineShape
    timeout_seconds: float
    verify: bool
    seconds: SyncSeconds = field(default_factory=SyncSeconds)
    _expected: list[Future[dict[tuple[int, str], str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fingerprints = Fingerprints(self.shape)
        self._pool = thread_pool(2 * len(self.servers) + 1, "megappo-sync")

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count what happens inside as time of a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            setattr(self.seconds, phase, getattr(self.seconds, phase) + time.monotonic() - started)

    def begin(self) -> None:
        """Open a session on every server; one that a broken sync left open is closed first."""
        with self.timed("session"):
            self._on_all(self._open)

    def _open(self, server: ServerSync) -> None:
        with suppress(ServerFailure):
            self._call(server, "/end_weight_update")  # answers "no session is open" unless a sync broke off
        self._call(server, "/begin_weight_update")

    def load(self, bucket: Bucket, flat_bytes: Tensor) -> None:
        """Start loading a bucket; its buffer is free again after the next `settle`."""
        for server in self.servers:
            if server.problem is None:
                server.loading = self._pool.submit(server.transport.load, bucket, flat_bytes)
        if self.verify and self.servers:
            whole = {slot.name: slot.view(flat_bytes) for slot in bucket.slots}
            self._expected.append(self._pool.submit(self._fingerprints.of_bucket, bucket.parameters, whole))

    def settle(self) -> None:
        """Wait until no buffer is in use."""
        with self.timed("load"):
            for server in self.servers:
                server.settle()
        with self.timed("verify"):
            for expected in self._expected:
                expected.result()

    def finish(self, version: int) -> None:
        """Close the sessions, compare what arrived, and only then give it its version."""
        self.settle()
        with self.timed("session"):
            self._on_all(lambda server: self._call(server, "/end_weight_update"))
        if self.verify:
            with self.timed("verify"):
                self._on_all(self._compare)
        with self.timed("session"):
            self._on_all(lambda server: self._call(server, "/flush_cache?timeout=10"))
            self._on_all(lambda server: self._publish(server, version))
        self._pool.shutdown()

    def _compare(self, server: ServerSync) -> None:
        answer = self._call(server, "/weights_checker", {"action": "checksum"})
        actual = {
            (place["tp_rank"], name): value
            for rank in answer["ranks"]
            for place in rank["parallelism_info"]
            for name, value in rank["checksums"].items()
        }
        expected = {key: value for part in self._expected for key, value in part.result().items()}
        wrong = differing(expected, actual)
        if wrong:
            raise ServerFailure(f"{server.endpoint.name} does not hold what was sent: {first_of(wrong, 5)}")

    def _publish(self, server: ServerSync, version: int) -> None:
        self._call(server, "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def _call(self, server: ServerSync, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return call(server.endpoint, path, body, timeout_seconds=self.timeout_seconds)

    def _on_all(self, action: Callable[[ServerSync], object]) -> None:
        jobs = [self._pool.submit(server.step, partial(action, server)) for server in self.servers]
        for job in jobs:
            job.result()
