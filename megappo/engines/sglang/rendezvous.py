"""Connects the parts of a server that stands on several machines.

Each part is an SGLang process group with a share of the server's ranks, started and guarded on its own machine; the
first one answers requests. The processes that start the parts share a key-value store of the first part. It says where
the ranks of each start meet, and that a part has ended, upon which all others are ended too.
"""

from __future__ import annotations

import datetime
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from megappo.config.engine import SGLangSettings
from megappo.engines.sglang.client import ServerFailure
from megappo.observe.json_values import JSONValue
from megappo.runtime.interfaces import GLOO_INTERFACE, interface_towards
from megappo.runtime.store import free_ports, listening_store
from megappo.runtime.waiting import wait_until

_POLL_SECONDS = 0.2
PEERS = "SGLANG_ZMQ_ALLOWED_PEERS"
_OWN_PORTS = 16
"""Free ports in a row that a server gets: SGLang 0.5.23 takes the 13 after the one that it is told (its server_args.py
and data_parallel_controller.py)."""


class MultiNodeRendezvous:
    """The key-value store over which the parts of one server meet, as one of the parts sees it."""

    def __init__(self, store: dist.Store, address: str, node: int, settings: SGLangSettings) -> None:
        """`address`: of the first part's machine, `node`: number of this part."""
        self._store, self._address, self.node, self._settings = store, address, node, settings
        self._ranks: dist.TCPStore | None = None
        self.peers: frozenset[str] = frozenset()
        """Addresses of all parts' machines, where they are known: only these may connect to SGLang's sockets."""

    @classmethod
    def host(cls, address: str, port: int, settings: SGLangSettings) -> MultiNodeRendezvous:
        """Make the first part's store, which listens at `address` (port 0: a free one). Raises OSError as sockets
        do."""
        timeout = datetime.timedelta(seconds=settings.start_timeout_seconds)
        return cls(listening_store(address, port, settings.nodes, timeout), address, 0, settings)

    @classmethod
    def join(
        cls, address: str, port: int, node: int, settings: SGLangSettings, patience_seconds: float
    ) -> MultiNodeRendezvous:
        """Connect another part to the first part's store. Raises ServerFailure where it does not listen within
        `patience_seconds`."""
        timeout = datetime.timedelta(seconds=patience_seconds)
        try:
            store = dist.TCPStore(address, port, settings.nodes, False, timeout, wait_for_workers=False)
        except dist.DistError:
            raise ServerFailure(f"nothing listens at {address}:{port}, where parts of a server meet") from None
        return cls(store, address, node, settings)

    @property
    def port(self) -> int:
        """Port on which the first part's store listens."""
        assert isinstance(self._store, dist.TCPStore)
        return int(self._store.port)

    def call(self, start: int) -> None:
        """Announce the meeting of this start's ranks, at a store of their own; called by the first part."""
        timeout = datetime.timedelta(seconds=self._settings.start_timeout_seconds)
        ranks = self._settings.tensor_parallel
        self._ranks = listening_store(self._address, 0, ranks, timeout)
        own = free_ports(self._address, _OWN_PORTS)
        self._store.set(f"{start}/meeting", f"{self._ranks.port} {own}")

    def is_called(self, start: int) -> bool:
        """Whether the first part has announced this start. Raises ServerFailure where its owner is gone."""
        return self._has(f"{start}/meeting")

    def await_call(self, start: int) -> None:
        """Wait for the announcement of this start. Raises ServerFailure as `is_called`, and where it does not come in
        time."""
        patience = self._settings.start_timeout_seconds
        if not wait_until(lambda: self.is_called(start), patience, every_seconds=_POLL_SECONDS):
            raise ServerFailure(f"the first part of a server was not started within {patience:g} seconds")

    def say_ended(self, start: int, reason: str) -> None:
        """Tell the others that this part has ended; the first reason counts."""
        with suppress(dist.DistError):
            self._store.compare_set(f"{start}/ended", "", reason)

    def why_ended(self, start: int) -> str | None:
        """Why a part has ended; None where none has as far as is known."""
        try:
            return self._store.get(f"{start}/ended").decode("utf-8", "replace") if self._has(f"{start}/ended") else None
        except ServerFailure as failure:
            return str(failure)

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except dist.DistError:
            raise ServerFailure("whoever started the first part of the server is gone") from None

    def arguments(self, start: int) -> dict[str, JSONValue]:
        """SGLang's arguments of this part. With data parallel attention SGLang sends requests to its groups at the
        ports that follow the one given here."""
        address = f"[{self._address}]" if ":" in self._address else self._address
        found: dict[str, JSONValue] = {"nnodes": self._settings.nodes, "node-rank": self.node}
        return found | {"dist-init-addr": f"{address}:{self._meeting(start)[1]}"}

    def _meeting(self, start: int) -> list[str]:
        """Port of the store at which the ranks meet, and the first of SGLang's own ports."""
        return str(self._store.get(f"{start}/meeting").decode()).split()

    def environment(self, start: int) -> dict[str, str]:
        """Environment variables for the ranks of the part. The ranks connect to megappo's store, because a store of
        torch would listen on all interfaces. The ranks then use the interface on the route to the first part."""
        found = {
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch then has no rank serve the store, which is ours
            "MASTER_ADDR": self._address,
            "MASTER_PORT": self._meeting(start)[0],
        }
        # Groups then talk over sockets that unpickle what anybody sends, so that peers are limited.
        if self._settings.data_parallel_attention > 1 and self.peers:
            found[PEERS] = ",".join(sorted(self.peers))
        if (interface := interface_towards(self._address)) is not None:
            found[GLOO_INTERFACE] = interface
        return found


@dataclass(frozen=True)
class ServerPart:
    """A part of a server in one of its starts."""

    rendezvous: MultiNodeRendezvous
    start: int

    def begin(self) -> None:
        """Announce this start to the other parts, or wait for the announcement. Raises ServerFailure as
        `MultiNodeRendezvous.await_call`."""
        if self.rendezvous.node == 0:
            self.rendezvous.call(self.start)
        else:
            self.rendezvous.await_call(self.start)
