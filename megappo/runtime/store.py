"""Addresses and ports of this machine, and the key-value store at which processes meet."""

from __future__ import annotations

import datetime
import errno
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, cast

import torch.distributed as dist

from megappo.errors import RunError, first_of
from megappo.observe.messages import tell
from megappo.runtime.launchers import Ranks

_LOW_PORTS = range(10000, 30000)
_TRIES = 100
_USUAL_SECONDS = 60.0
"""Time after which rank 0 prints whom it waits for."""
_COUNT, _ALL = "megappo/come", "megappo/all-come"


def another_connection(store: dist.Store) -> dist.Store:
    """Another connection to the same store, for another thread: a call that waits there does not block this one."""
    connected: dist.Store = cast(Any, store).clone()  # in torch's types only from 2.14 on
    return connected


def listening_store(
    address: str, port: int, world_size: int, timeout: datetime.timedelta, *, on_one_machine: bool = False
) -> dist.TCPStore:
    """torch's store for `world_size` processes to meet at `address`:`port` (0: a free one), served by this process,
    which does not wait for the others.

    torch's own listens on every interface, without authentication. This one listens on that of `address` alone, except
    where the others may know it by another. That is so when `address` is none of this machine's (behind address
    translation), or when some ranks are on other machines (`on_one_machine` false) and it is a name that resolves to
    the loopback interface here, or to several interfaces, as /etc/hosts and resolvers of many distributions have it.
    Raises OSError where nothing can listen there.
    """
    places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, kind, _, _, place = places[0]
    found = {str(found[4][0]) for found in places}
    is_plain = found == {address} or address == "localhost"
    if not (is_plain or on_one_machine) and (len(found) > 1 or any(map(_loops_back, found))):
        return dist.TCPStore(address, port, world_size, True, timeout, False)
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return dist.TCPStore(address, port, world_size, True, timeout, False)
        listener.listen(max(128, world_size))
        port = listener.getsockname()[1]
        return dist.TCPStore(address, port, world_size, True, timeout, False, master_listen_fd=listener.detach())


def await_all(store: dist.Store, ranks: Ranks, patience: datetime.timedelta) -> None:
    """Wait until all ranks are at the store. Raises RunError that names those that do not come.

    Rank 0 prints whom it waits for where that takes longer than it should.
    """
    store.set(_come(ranks.rank), socket.gethostname())
    if store.add(_COUNT, 1) == ranks.world_size:
        store.set(_ALL, "yes")
    for seconds in (min(_USUAL_SECONDS, patience.total_seconds()), patience.total_seconds()):
        try:
            return store.wait([_ALL], datetime.timedelta(seconds=seconds))
        except dist.DistStoreError:
            missing = [rank for rank in range(ranks.world_size) if not store.check([_come(rank)])]
            whom = f"{'rank' if len(missing) == 1 else 'ranks'} {first_of(missing, 8)} of {ranks.world_size}"
            if ranks.rank == 0 and seconds < patience.total_seconds():
                tell(f"waiting for {whom} to start")
    raise RunError(
        f"{whom} did not come within {patience.total_seconds():g} seconds; see their logs, and whether their machines "
        "are up and reach this one"
    )


def _come(rank: int) -> str:
    return f"megappo/come-{rank}"


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound to an address of this machine; raises OSError where that fails."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)
        yield probe


def free_port(host: str) -> int:
    """A port of the interface that nobody listens on, below Linux's ephemeral ports: another connection may take one of
    those before anybody listens. Raises OSError where the interface is none of this machine's."""
    with _bound(host, 0):
        return free_ports(host, 1)


def free_ports(host: str, count: int) -> int:
    """First of so many consecutive ports that nobody listens on, below Linux's ephemeral ports. Raises OSError where
    there are none."""
    draw = random.SystemRandom()  # forks of one process, and runs with one seed, must draw different ports
    for first in (draw.choice(_LOW_PORTS[:-count]) for _ in range(_TRIES)):
        if all(listening_problem(host, port) is None for port in range(first, first + count)):
            return first
    raise OSError(errno.EADDRINUSE, f"no {count} ports in a row are free on {host}")


def address_towards(host: str, port: int) -> str:
    """Address of this machine in its packets to another one. Raises OSError where there is no route."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


def is_address(host: str) -> bool:
    """Whether a host is an IP address rather than a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only. Raises OSError for a name that cannot be resolved."""
    return all(_loops_back(str(place[4][0])) for place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))


def _loops_back(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def listening_problem(host: str, port: int) -> str | None:
    """Why nothing can listen at an address (port 0: any port); None where something can."""
    try:
        with _bound(host, port):
            return None
    except OSError as error:
        return error.strerror or str(error)
