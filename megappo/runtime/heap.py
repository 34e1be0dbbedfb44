"""What C's allocator does with memory that tensors on a CPU had, which GNU's alone lets itself be told, and when Python
looks for garbage."""

from __future__ import annotations

import ctypes
import functools
import gc

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Of malloc.h."""

_SELDOM = 1_000_000, 10, 10
"""Objects that are made between two searches for garbage, and such searches between larger ones."""


@functools.cache
def _usual() -> tuple[int, int, int]:
    return gc.get_threshold()


def put_off_collections() -> None:
    """Hardly look for garbage until `collect_as_usual`; for a process that only imports.

    A million objects come and stay, and by default Python looks through all of them after every quarter that is added:
    one of six CPU seconds that a rank imports for.
    """
    _usual()
    gc.set_threshold(*_SELDOM)


def collect_as_usual() -> None:
    """Look for garbage as before `put_off_collections`, but never in what is there now. Without it, do nothing."""
    if gc.get_threshold() == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_usual())


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Let this process use freed memory again instead of handing it back, until `trim_heap` does.

    Activations of every layer come and go. By default what is free at the end of the heap is given back, and each
    tensor of more than 32 MiB; the kernel clears every page of them anew, up to a tenth of an update on a CPU.
    """
    mallopt = getattr(_c_library(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TOP_PAD, 2**26)


def trim_heap() -> None:
    """Give back to the system what the allocator keeps."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)
