"""Memory of a process: the C allocator's for CPU tensors, which only glibc lets us set, Python's garbage and frames."""

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
"""Thresholds of `gc.set_threshold`: new objects between two collections, and collections between those of older
generations."""

_SLOTS_OF_FRAMES = 2**16
"""Values of a frame that takes half of a MiB; the other half has room for 2000 frames of 30 values."""


@functools.cache
def _usual() -> tuple[int, int, int]:
    return gc.get_threshold()


def put_off_collections() -> None:
    """Hardly collect garbage until `collect_as_usual`; for a process that only imports.

    Imports create a million objects that stay, and by default Python scans all of them whenever they have grown by a
    quarter: one of the six CPU seconds of a rank's imports.
    """
    _usual()
    gc.set_threshold(*_SELDOM)


def collect_as_usual() -> None:
    """Collect garbage as before `put_off_collections`, but never the objects that exist now: Python looks for garbage
    once more when a process ends, too. Does nothing without that call."""
    if gc.get_threshold() == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_usual())


@contextmanager
def collections_put_off() -> Iterator[None]:
    """Hardly collect garbage in a block that mostly imports, and as usual after it."""
    put_off_collections()
    try:
        yield
    finally:
        collect_as_usual()


def with_room_for_frames(program: Callable[[], T]) -> T:
    """Call a program so that no loop in it is slow for where it stands in the stack.

    Python keeps a thread's frames in chunks of 16 KiB, and gives one back as soon as it is empty (3.11 on,
    `_PyThreadState_PopFrame`). A loop whose calls cross the end of a chunk maps and unmaps memory at each call, which
    takes a hundred times as long. The frame of this function claims so much that its chunk is of a MiB, in which those
    above it have room, too. What they do not touch takes no memory.
    """
    return program()


with_room_for_frames.__code__ = with_room_for_frames.__code__.replace(co_stacksize=_SLOTS_OF_FRAMES)


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Let this process reuse freed memory instead of returning it to the system, until `trim_heap` does.

    Activations of every layer are allocated and freed again. By default glibc returns free memory at the end of the
    heap, and each tensor of more than 32 MiB; the kernel then clears every page anew, which takes up to a tenth of an
    update on a CPU (benchmarks/results/2026-11-24-update-cpu.md).
    """
    mallopt = getattr(_c_library(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TOP_PAD, 2**26)


def trim_heap() -> None:
    """Return the memory that the allocator keeps to the system."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)
