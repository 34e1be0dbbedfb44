"""Addresses and ports of this machine, and the key-value store at which processes meet."""

from __future__ import annotations

import datetime
import errno
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, cast

import torch.distributed as dist

Place = tuple[socket.AddressFamily, socket.SocketKind, tuple[Any, ...]]
"""Family, kind and address of a socket."""
_LOW_PORTS = range(10000, 30000)
_TRIES = 100


def another_connection(store: dist.Store) -> dist.Store:
    """Another connection to the same store, for another thread: a call that waits there does not block this one."""
    connected: dist.Store = cast(Any, store).clone()  # in torch's types only from 2.14 on
    return connected


def addresses_of(host: str, port: int) -> list[Place]:
    """Socket addresses of a host. Raises OSError for a name that cannot be resolved."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, kind, place) for family, kind, _, _, place in found]


def listening_store(
    address: str, port: int, world_size: int, timeout: datetime.timedelta, *, on_one_machine: bool = False
) -> dist.TCPStore:
    """torch's store for `world_size` processes to meet at `address`:`port` (0: a free one), served by this process,
    which does not wait for the others.

    torch's own listens on every interface, without authentication. This one listens on that of `address` alone, except
    where the others may know it by another. That is so when `address` is none of this machine's (behind address
    translation), or when some ranks are on other machines (`on_one_machine` false) and it is a name that resolves to
    the loopback interface here, or to several interfaces, as /etc/hosts and resolvers of many distributions have it.
    Raises OSError if the store cannot listen on the address.
    """
    places = addresses_of(address, port)
    return store_at(address, places, world_size, timeout, on_one_machine=on_one_machine)


def store_at(
    address: str, places: Sequence[Place], world_size: int, timeout: datetime.timedelta, *, on_one_machine: bool
) -> dist.TCPStore:
    """As `listening_store`, with the result of `addresses_of`. This function does not resolve names."""
    family, kind, place = places[0]
    own, port = str(place[0]), int(place[1])
    found = {str(place[0]) for _, _, place in places}
    is_plain = found == {address} or address == "localhost"
    if not (is_plain or on_one_machine) and (len(found) > 1 or any(map(loops_back, found))):
        return dist.TCPStore(own, port, world_size, True, timeout, False)
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return dist.TCPStore(own, port, world_size, True, timeout, False)
        listener.listen(max(128, world_size))
        port = listener.getsockname()[1]
        return dist.TCPStore(own, port, world_size, True, timeout, False, master_listen_fd=listener.detach())


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
    """Source address of packets from this machine to a host. If the host has several addresses, loopback addresses are
    tried last. Raises OSError if there is no route to the host."""
    places = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    problem = OSError(errno.EHOSTUNREACH, "no route to host")
    for family, kind, _, _, place in sorted(places, key=lambda found: loops_back(str(found[4][0]))):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(place)  # sends nothing
                return str(probe.getsockname()[0])
            except OSError as error:
                problem = error
    raise problem


def is_address(host: str) -> bool:
    """Whether a host is an IP address rather than a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. Raises OSError for a name that cannot be resolved."""
    return all(loops_back(str(place[4][0])) for place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))


def loops_back(address: str) -> bool:
    """Whether an IP address belongs to the loopback interface."""
    return address.startswith("127.") or address == "::1"


def listening_problem(host: str, port: int) -> str | None:
    """Why nothing can listen at an address (port 0: any port); None where something can."""
    try:
        with _bound(host, port):
            return None
    except OSError as error:
        return error.strerror or str(error)
