"""Memory of a process: the C allocator (glibc only), Python's garbage collector, and the stack of Python frames."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Parameters of `mallopt`, from glibc's malloc.h."""

_SELDOM = 1_000_000, 10, 10
"""Arguments of `gc.set_threshold` for rare collections: number of new objects between two collections, and number of
collections between two collections of each older generation."""

_SLOTS_OF_FRAMES = 2**16
"""Stack size of a frame of half a MiB. The other half of its chunk has room for 2000 frames of 30 values."""


@functools.cache
def _usual() -> tuple[int, int, int]:
    return gc.get_threshold()


def put_off_collections() -> None:
    """Make garbage collections rare until `collect_as_usual`, for a process that only imports modules.

    Imports create a million permanent objects. By default, Python scans all objects whenever their number has grown by
    a quarter. These scans take one of the six CPU seconds of the imports of a rank.
    """
    _usual()
    gc.set_threshold(*_SELDOM)


def collect_as_usual() -> None:
    """Restore the garbage collection from before `put_off_collections`, without the objects that exist now.

    Excluded objects also save time at exit, when Python collects once more. Does nothing if `put_off_collections` was
    not called.
    """
    if gc.get_threshold() == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_usual())


@contextmanager
def collections_put_off() -> Iterator[None]:
    """Make garbage collections rare in a block that mostly imports modules, and restore them afterwards."""
    put_off_collections()
    try:
        yield
    finally:
        collect_as_usual()


def with_room_for_frames(program: Callable[[], T]) -> T:
    """Call a program in a chunk of the frame stack that is large enough for its calls.

    Python stores the frames of a thread in chunks of 16 KiB, and frees a chunk as soon as it is empty (since Python
    3.11, `_PyThreadState_PopFrame`). A loop whose calls cross the end of a chunk maps and unmaps memory at each call,
    and becomes a hundred times slower. The frame of this function requests a large stack, so Python allocates a chunk
    of 1 MiB. Later frames fit into the same chunk. Untouched pages of the chunk take no memory.
    """
    return program()


with_room_for_frames.__code__ = with_room_for_frames.__code__.replace(co_stacksize=_SLOTS_OF_FRAMES)


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Make the allocator reuse freed memory instead of returning it to the system, until `trim_heap`.

    Each layer allocates and frees its activations repeatedly. By default, glibc returns free memory at the end of the
    heap, and each tensor of more than 32 MiB. The kernel then clears every page again. This takes up to a tenth of an
    update on a CPU (benchmarks/results/2026-11-24-update-cpu.md).
    """
    mallopt = getattr(_c_library(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TOP_PAD, 2**26)


def trim_heap() -> None:
    """Return the free memory of the allocator to the system."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)
