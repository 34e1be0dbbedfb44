"""The network interface of gloo's connections between ranks.

Without `GLOO_SOCKET_IFNAME` torch uses the address that the name of the machine resolves to. On Ubuntu and Debian this
is often 127.0.1.1, which other machines do not reach. megappo therefore chooses the interface on the route to a
different machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from megappo.network.store import address_towards, is_loopback

GLOO_INTERFACE, LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
ANY_PORT = 9
"""Placeholder for a port of a different machine. No packet is sent to this port."""
_CHANGE = threading.Lock()


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IP address; None if this machine does not have the address."""
    plain = address.partition("%")[0]  # IPv6 addresses of one link end with the name of the interface
    for name, addresses in psutil.net_if_addrs().items():
        if any(plain == of_interface.address.partition("%")[0] for of_interface in addresses):
            return name
    return None


def interface_towards(host: str) -> str | None:
    """Return the name of the interface on the route to a host. If the address belongs to this machine, this is the
    interface with the address.

    Returns None if there is no route to the host. Also returns None if the name is a loopback address on this machine,
    because the name may have a different address on other machines.
    """
    try:
        if is_loopback(host):
            return None
        return interface_of(address_towards(host, ANY_PORT))
    except OSError:
        return None


@contextmanager
def reached_at(address: str) -> Iterator[None]:
    """Make gloo listen on the interface with `address` instead of loopback within the context. Groups with members on
    other machines need this."""
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
