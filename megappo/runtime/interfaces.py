"""The network interface of gloo's connections between ranks.

Without `GLOO_SOCKET_IFNAME` torch uses the address that the name of the machine resolves to. On Ubuntu and Debian this
is often 127.0.1.1, which other machines do not reach. The interface is therefore chosen from a route to another one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from megappo.runtime.store import address_towards, is_loopback

GLOO_INTERFACE, LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
ANY_PORT = 9
"""Port that stands in for any port of another machine; nothing is sent to it."""
_CHANGE = threading.Lock()


def interface_of(address: str) -> str | None:
    """Name of the interface with this IP address; None if this machine does not have the address."""
    plain = address.partition("%")[0]  # IPv6 addresses of one link end with the name of the interface
    for name, addresses in psutil.net_if_addrs().items():
        if any(plain == of_interface.address.partition("%")[0] for of_interface in addresses):
            return name
    return None


def interface_towards(host: str) -> str | None:
    """Name of the interface through which this machine reaches a host, or which owns the address of the host.

    None if the host has no address or no route, or if its name means loopback here: other machines may know the name by
    another address.
    """
    try:
        if is_loopback(host):
            return None
        return interface_of(address_towards(host, ANY_PORT))
    except OSError:
        return None


@contextmanager
def reached_at(address: str) -> Iterator[None]:
    """Within the context, groups over gloo may have members on other machines, which know this one by `address`."""
    if os.environ.get(GLOO_INTERFACE) != LOOPBACK or is_loopback(address):
        yield
        return
    interface = interface_towards(address)
    with _CHANGE:
        os.environ.pop(GLOO_INTERFACE)
        if interface is not None:
            os.environ[GLOO_INTERFACE] = interface
        try:
            yield
        finally:
            os.environ[GLOO_INTERFACE] = LOOPBACK
