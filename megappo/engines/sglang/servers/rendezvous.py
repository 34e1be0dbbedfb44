"""Connect the parts of a server on several machines.

Each part is an SGLang process group with a share of the ranks of the server. Each part is started and guarded on its
own machine, and the first part answers requests. The processes that start the parts share a key-value store on the
machine of the first part. The store contains the meeting point of the ranks of each start. The store also reports the
end of a part, and all other parts are then ended too.
"""

from __future__ import annotations

import datetime
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from megappo.config.sections.engine import ServerSettings
from megappo.engines.sglang.client import ServerFailure
from megappo.files.json_values import JSONValue
from megappo.network.interfaces import GLOO_INTERFACE, interface_towards
from megappo.network.store import free_ports, listening_store
from megappo.runtime.waiting import wait_until

_POLL_SECONDS = 0.2
PEERS = "SGLANG_ZMQ_ALLOWED_PEERS"
_OWN_PORTS = 16
"""Number of consecutive free ports of a server. SGLang 0.5.23 uses the 13 ports after its configured port (its
server_args.py and data_parallel_controller.py)."""


class MultiNodeRendezvous:
    """The key-value store that connects the parts of one server, as seen by one part."""

    def __init__(self, store: dist.Store, address: str, node: int, settings: ServerSettings) -> None:
        """Wrap a store. `address` is the address of the first machine. `node` is the number of this part."""
        self._store, self._address, self.node, self._settings = store, address, node, settings
        self._ranks: dist.TCPStore | None = None
        self.peers: frozenset[str] = frozenset()
        """Addresses of the machines of all parts, if known. Only these machines may connect to the sockets of
        SGLang."""

    @classmethod
    def host(cls, address: str, port: int, settings: ServerSettings) -> MultiNodeRendezvous:
        """Create the store of the first part, which listens at `address`. Port 0 selects a free port. Raises
        OSError."""
        timeout = datetime.timedelta(seconds=settings.start_timeout_seconds)
        return cls(listening_store(address, port, settings.nodes, timeout), address, 0, settings)

    @classmethod
    def join(
        cls, address: str, port: int, node: int, settings: ServerSettings, patience_seconds: float
    ) -> MultiNodeRendezvous:
        """Connect another part to the store of the first part. Raises ServerFailure if the store does not listen
        within `patience_seconds`."""
        timeout = datetime.timedelta(seconds=patience_seconds)
        try:
            store = dist.TCPStore(address, port, settings.nodes, False, timeout, wait_for_workers=False)
        except dist.DistError:
            raise ServerFailure(f"no store listens at {address}:{port}, where parts of a server connect") from None
        return cls(store, address, node, settings)

    @property
    def port(self) -> int:
        """Port of the store of the first part."""
        assert isinstance(self._store, dist.TCPStore)
        return int(self._store.port)

    def call(self, start: int) -> None:
        """Announce the meeting point of the ranks of this start, in a separate store. Called by the first part."""
        timeout = datetime.timedelta(seconds=self._settings.start_timeout_seconds)
        ranks = self._settings.tensor_parallel
        self._ranks = listening_store(self._address, 0, ranks, timeout)
        own = free_ports(self._address, _OWN_PORTS)
        self._store.set(f"{start}/meeting", f"{self._ranks.port} {own}")

    def is_called(self, start: int) -> bool:
        """Return whether the first part has announced this start. Raises ServerFailure if the owner of the first part
        has ended."""
        return self._has(f"{start}/meeting")

    def await_call(self, start: int) -> None:
        """Wait for the announcement of this start. Raises ServerFailure as `is_called`, and if the announcement is
        late."""
        patience = self._settings.start_timeout_seconds
        if not wait_until(lambda: self.is_called(start), patience, every_seconds=_POLL_SECONDS):
            raise ServerFailure(f"the first part of a server was not started within {patience:g} seconds")

    def say_ended(self, start: int, reason: str) -> None:
        """Report the end of this part to the other parts. The first reason counts."""
        with suppress(dist.DistError):
            self._store.compare_set(f"{start}/ended", "", reason)

    def why_ended(self, start: int) -> str | None:
        """Return the reason why a part has ended, or None if no part is known to have ended."""
        try:
            return self._store.get(f"{start}/ended").decode("utf-8", "replace") if self._has(f"{start}/ended") else None
        except ServerFailure as failure:
            return str(failure)

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except dist.DistError:
            raise ServerFailure("the process that started the first part of the server has ended") from None

    def arguments(self, start: int) -> dict[str, JSONValue]:
        """Return the SGLang arguments of this part. With data parallel attention, SGLang sends requests to its groups
        at the ports after this port."""
        address = f"[{self._address}]" if ":" in self._address else self._address
        found: dict[str, JSONValue] = {"nnodes": self._settings.nodes, "node-rank": self.node}
        return found | {"dist-init-addr": f"{address}:{self._meeting(start)[1]}"}

    def _meeting(self, start: int) -> list[str]:
        """Return the port of the store for the ranks, and the first port of SGLang."""
        return str(self._store.get(f"{start}/meeting").decode()).split()

    def environment(self, start: int) -> dict[str, str]:
        """Return environment variables for the ranks of the part. The ranks connect to megappo's store, because a
        store of torch would listen on all interfaces. The ranks then use the interface on the route to the first
        part."""
        found = {
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # prevents a rank from serving the store, which belongs to megappo
            "MASTER_ADDR": self._address,
            "MASTER_PORT": self._meeting(start)[0],
        }
        # Groups then use sockets that unpickle any received data, so peers are limited.
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
