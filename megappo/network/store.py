"""Addresses and ports of this machine, and the key-value store to which all processes connect."""

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
    """Open another connection to the same store for another thread. Waiting calls of one connection do not block the
    other."""
    connected: dist.Store = cast(Any, store).clone()  # torch declares the method from 2.14 on
    return connected


def addresses_of(host: str, port: int) -> list[Place]:
    """Return the socket addresses of a host. Raises OSError for a name that cannot be resolved."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, kind, place) for family, kind, _, _, place in infos]


def listening_store(
    address: str, port: int, world_size: int, timeout: datetime.timedelta, *, on_one_machine: bool = False
) -> dist.TCPStore:
    """Serve a store of torch for `world_size` processes at `address`:`port` (0: a free port), without waiting for the
    other processes.

    A store of torch listens on every interface, without authentication. This store listens only on the interface of
    `address`, with two exceptions in which other machines may use a different address of this machine:

    - `address` does not belong to this machine, for example because of address translation.
    - Some ranks are on other machines (`on_one_machine` false), and `address` is a name for the loopback interface or
      for several addresses. Many distributions configure /etc/hosts and resolvers in this way.

    Raises OSError if the store cannot listen on the address.
    """
    places = addresses_of(address, port)
    return store_at(address, places, world_size, timeout, on_one_machine=on_one_machine)


def store_at(
    address: str, places: Sequence[Place], world_size: int, timeout: datetime.timedelta, *, on_one_machine: bool
) -> dist.TCPStore:
    """Serve a store as `listening_store` does, from the result of `addresses_of`. This function resolves no names."""
    family, kind, place = places[0]
    own, port = str(place[0]), int(place[1])
    hosts = {str(place[0]) for _, _, place in places}
    is_plain = hosts == {address} or address == "localhost"
    if not (is_plain or on_one_machine) and (len(hosts) > 1 or any(map(is_loopback_ip, hosts))):
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
    """Bind a socket to an address of this machine. Raises OSError if this fails."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)
        yield probe


def free_port(host: str) -> int:
    """Return a free port of the interface. Raises OSError if this machine does not have the interface.

    The port is below Linux's ephemeral ports, which other connections may take at any time.
    """
    with _bound(host, 0):
        return free_ports(host, 1)


def free_ports(host: str, count: int) -> int:
    """Return the first of `count` consecutive free ports, below Linux's ephemeral ports. Raises OSError if no such
    range is found."""
    draw = random.SystemRandom()  # forks of one process, and runs with one seed, must draw different ports
    for first in (draw.choice(_LOW_PORTS[:-count]) for _ in range(_TRIES)):
        if all(listening_problem(host, port) is None for port in range(first, first + count)):
            return first
    raise OSError(errno.EADDRINUSE, f"no {count} ports in a row are free on {host}")


def address_towards(host: str, port: int) -> str:
    """Return the source address of packets from this machine to a host. If the host has several addresses, loopback
    addresses are tried last. Raises OSError if there is no route to the host."""
    places = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    problem = OSError(errno.EHOSTUNREACH, "no route to host")
    for family, kind, _, _, place in sorted(places, key=lambda info: is_loopback_ip(str(info[4][0]))):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(place)  # sends nothing
                return str(probe.getsockname()[0])
            except OSError as error:
                problem = error
    raise problem


def is_address(host: str) -> bool:
    """Return whether a host is an IP address instead of a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address. Raises OSError for a name that cannot be resolved."""
    return all(is_loopback_ip(str(place[4][0])) for place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))


def is_loopback_ip(address: str) -> bool:
    """Return whether an IP address belongs to the loopback interface."""
    return address.startswith("127.") or address == "::1"


def listening_problem(host: str, port: int) -> str | None:
    """Return the reason that no process can listen at an address, or None. Port 0 means any port."""
    try:
        with _bound(host, port):
            return None
    except OSError as error:
        return error.strerror or str(error)
