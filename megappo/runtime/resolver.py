"""How this process resolves host names while many ranks connect."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SWITCH = Path("/etc/nsswitch.conf")
_FILES, _DEFAULT = b"files", b"files dns"
"""Sources of host names: /etc/hosts alone, and glibc's default."""


@contextmanager
def names_from_files() -> Iterator[None]:
    """Within the context this process resolves host names from /etc/hosts alone, without a name server.

    The store of torch looks up the name of each peer for its log messages (`formatSockAddr` of torch 2.11 to 2.14,
    torch/csrc/distributed/c10d/socket.cpp), and its server does so in one thread. If the name server has no names for
    addresses, each connection waits for its answer. torch has no option for this, so glibc's `__nss_configure_lookup`
    is used. Other threads of the process cannot resolve names of a name server within the context. Without glibc there
    is no change.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is None:
        yield
        return
    configure(b"hosts", _FILES)
    try:
        yield
    finally:
        configure(b"hosts", _configured())


def _configured() -> bytes:
    """Sources of host names that this machine is configured with."""
    try:
        lines = _SWITCH.read_bytes()
    except OSError:
        return _DEFAULT
    found = re.search(rb"^[ \t]*hosts:[ \t]*([^#\n]*[^#\s])", lines, re.MULTILINE)
    return found[1] if found is not None else _DEFAULT
