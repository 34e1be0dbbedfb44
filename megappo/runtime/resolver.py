"""Switches name servers off while many ranks connect."""

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
    """Within the context, this process resolves host names only from /etc/hosts.

    The store of torch looks up the name of each peer for log messages (`formatSockAddr` in
    torch/csrc/distributed/c10d/socket.cpp, torch 2.11 to 2.14). A single thread of the server looks up all names, so
    each connection waits for the name server. torch has no option against this. This function therefore calls
    `__nss_configure_lookup` of glibc. Within the context, other threads of the process cannot use a name server. With a
    different C library, nothing changes.
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
    """Sources of host names in the configuration of this machine."""
    try:
        lines = _SWITCH.read_bytes()
    except OSError:
        return _DEFAULT
    found = re.search(rb"^[ \t]*hosts:[ \t]*([^#\n]*[^#\s])", lines, re.MULTILINE)
    return found[1] if found is not None else _DEFAULT
