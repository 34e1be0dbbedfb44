"""Offload of device memory to the host.

The functions move whole storages instead of tensors. An offloaded storage has no bytes on the device. Views of the
storage stay valid, and their values are available again after the storage is restored. Copies run in parallel with
computation on a separate stream. Without CUDA, the replacements of `megatron.patches.cpu` make the calls synchronous.
"""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megappo.errors import RunError

_BLOCK_BYTES = 2**28
"""Largest block of offloaded memory. torch rounds pinned memory up to a power of two, so a single block of 9 GB would
take 16 GB."""


class RestingPlace:
    """Bytes outside of the device: pinned host memory with CUDA, otherwise an unnamed file.

    Without CUDA, the offload is meant to free host memory. The file disappears at any end of the process.
    """

    def __init__(self, device: torch.device, directory: Path | None = None, block_bytes: int = _BLOCK_BYTES) -> None:
        self._on_cuda, self._directory, self._block_bytes = device.type == "cuda", directory, block_bytes
        self._blocks: list[tuple[int, Tensor]] = []
        """Blocks in order, each with the offset of its first byte."""
        self.n_bytes = 0

    def reserve(self, n_bytes: int) -> None:
        """Allocate blocks until the total is `n_bytes`. Existing content is preserved. Raises RunError if the disk is
        full."""
        while self.n_bytes < n_bytes:
            size = min(n_bytes - self.n_bytes, self._block_bytes)
            block = torch.empty(size, dtype=torch.uint8, pin_memory=True) if self._on_cuda else self._mapped(size)
            self._blocks.append((self.n_bytes, block))
            self.n_bytes += size

    def put(self, start: int, source_n: Tensor) -> None:
        """Copy bytes from `source_n`, starting at byte `start` of the place."""
        for block, begin, end in self._pieces(start, len(source_n)):
            block.copy_(source_n[begin:end], non_blocking=True)

    def get(self, start: int, out_n: Tensor) -> None:
        """Copy bytes to `out_n`, starting at byte `start` of the place."""
        for block, begin, end in self._pieces(start, len(out_n)):
            out_n[begin:end].copy_(block, non_blocking=True)

    def _pieces(self, start: int, size: int) -> Iterator[tuple[Tensor, int, int]]:
        """Yield the parts of blocks in a range of bytes, each with its begin and end within the range."""
        for first, block in self._blocks:
            begin, end = max(start, first), min(start + size, first + len(block))
            if begin < end:
                yield block[begin - first : end - first], begin - start, end - start

    def _mapped(self, size: int) -> Tensor:
        try:
            with tempfile.TemporaryFile(dir=self._directory, prefix="megappo-") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # raises if the disk is full, where a write would signal
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            folder = self._directory or tempfile.gettempdir()
            raise RunError(
                f"offloaded memory of a role does not fit in {folder}: {error.strerror}; set runtime.offload_directory "
                f"to a folder with enough space, or disable offload"
            ) from error


class Movable:
    """Storages that are offloaded and restored together."""

    def __init__(self, place: RestingPlace | None = None) -> None:
        """`place`: storage of the content; None: the content is lost, and restored storages are uninitialised."""
        self._place = place
        self._storages: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
        """Storages of the last offload by identity: the storage, its size, and the offset of its first byte."""
        self._place_is_current = False
        """Whether the place still has the same content as the device."""
        self._arrival: torch.cuda.Event | None = None
        self.is_away = False

    def leave(self, tensors: Iterable[Tensor], reserve_bytes: int = 0) -> None:
        """Move the storages of these tensors off the device. Empty storages are skipped. Does nothing if the storages
        are already offloaded.

        `reserve_bytes`: total size that all of the storages will need later.
        """
        if self.is_away:
            return
        before, self._storages, end = self._storages.keys(), {}, 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in self._storages:
                self._storages[storage._cdata] = (storage, storage.nbytes(), end)
                end += storage.nbytes()
        if self._place is not None and not (self._place_is_current and before == self._storages.keys()):
            self._place.reserve(max(end, reserve_bytes))
            self._copy(to_place=True)
        for storage, _, _ in self._storages.values():
            storage.resize_(0)
        self.is_away, self._place_is_current = True, True

    def restore(self, *, unchanged: bool = False) -> None:
        """Start to restore the storages. Call `arrive` before using them. `unchanged`: the tensors are only read, so
        the next offload copies nothing."""
        self._place_is_current = self._place_is_current and unchanged
        if not self.is_away:
            return
        if self._place is not None:
            _stream().synchronize()  # afterwards, the memory of earlier offloads is free
        for storage, size, _ in self._storages.values():
            storage.resize_(size)
        if self._place is not None:
            self._copy(to_place=False)
            self._arrival = _stream().record_event()
        self.is_away = False

    def arrive(self) -> None:
        """Make later work of the current stream wait for the copies of `restore`."""
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)
            self._arrival = None

    def read(self, tensor: Tensor, elements: slice) -> Tensor | None:
        """Return a copy of elements of a contiguous tensor, flattened, on its device; None if it is not offloaded."""
        entry = self._storages.get(tensor.untyped_storage()._cdata) if self.is_away else None
        if entry is None or self._place is None:
            return None
        start, stop, _ = elements.indices(tensor.numel())
        copy_n = torch.empty(max(0, stop - start), dtype=tensor.dtype, device=tensor.device)
        torch.cuda.current_stream().wait_stream(_stream())
        first = entry[2] + (int(tensor.storage_offset()) + start) * tensor.itemsize
        self._place.get(first, copy_n.view(torch.uint8))
        return copy_n

    @torch.no_grad()
    def _copy(self, *, to_place: bool) -> None:
        assert self._place is not None
        stream = _stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for storage, _, start in self._storages.values():
                flat_n = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                (self._place.put if to_place else self._place.get)(start, flat_n)
                if flat_n.is_cuda:
                    flat_n.record_stream(stream)  # prevents reuse of the memory before the copy completes


@functools.cache
def _stream() -> torch.cuda.Stream:
    """Return the only stream of all copies, so that a restore waits for earlier offloads."""
    return torch.cuda.Stream()
