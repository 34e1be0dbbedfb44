"""Name resolution without name servers, for the time in which many ranks connect."""

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
    """Resolve host names only from /etc/hosts in this process within the context.

    The store of torch resolves the name of each peer for log messages (`formatSockAddr` in
    torch/csrc/distributed/c10d/socket.cpp, torch 2.11 to 2.14). A single thread of the server resolves all names, so
    each connection waits for the name server. torch has no option to disable this. This function therefore calls
    `__nss_configure_lookup` of glibc. Within the context, other threads of the process cannot use a name server. With a
    different C library, this function does nothing.
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
    """Return the sources of host names in the configuration of this machine."""
    try:
        lines = _SWITCH.read_bytes()
    except OSError:
        return _DEFAULT
    match = re.search(rb"^[ \t]*hosts:[ \t]*([^#\n]*[^#\s])", lines, re.MULTILINE)
    return match[1] if match is not None else _DEFAULT
