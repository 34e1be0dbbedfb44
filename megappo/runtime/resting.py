"""Memory that leaves the device and comes back.

Whole storages are moved, not tensors. An offloaded storage has no bytes on the device; tensors that view it stay valid
and have their values again once it is back. Copies use a stream of their own, in parallel with computation. Without
CUDA, where `megatron_cpu.install` has installed its stand-ins, the same calls copy at once.
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
"""Largest piece of a resting place. torch rounds pinned memory up to a power of two, so one piece of 9 GB would take 16
GB."""


class RestingPlace:
    """Bytes outside of the device: pinned host memory. Without CUDA, where host memory is what is to be freed, they are
    in an unnamed file, which vanishes with this process, however it ends."""

    def __init__(self, device: torch.device, directory: Path | None = None, block_bytes: int = _BLOCK_BYTES) -> None:
        self._on_cuda, self._directory, self._block_bytes = device.type == "cuda", directory, block_bytes
        self._blocks: list[tuple[int, Tensor]] = []
        """Blocks in order, each with the position of its first byte."""
        self.n_bytes = 0

    def reserve(self, n_bytes: int) -> None:
        """Make room for so many bytes; existing content stays. Raises RunError where a disk is full."""
        while self.n_bytes < n_bytes:
            size = min(n_bytes - self.n_bytes, self._block_bytes)
            block = torch.empty(size, dtype=torch.uint8, pin_memory=True) if self._on_cuda else self._mapped(size)
            self._blocks.append((self.n_bytes, block))
            self.n_bytes += size

    def put(self, start: int, source_n: Tensor) -> None:
        """Copy bytes to here, from byte `start` on."""
        for block, begin, end in self._pieces(start, len(source_n)):
            block.copy_(source_n[begin:end], non_blocking=True)

    def get(self, start: int, out_n: Tensor) -> None:
        """Copy the bytes from byte `start` on to `out_n`."""
        for block, begin, end in self._pieces(start, len(out_n)):
            out_n[begin:end].copy_(block, non_blocking=True)

    def _pieces(self, start: int, size: int) -> Iterator[tuple[Tensor, int, int]]:
        """Parts of blocks that a run of bytes covers, each with its begin and end within the run."""
        for first, block in self._blocks:
            begin, end = max(start, first), min(start + size, first + len(block))
            if begin < end:
                yield block[begin - first : end - first], begin - start, end - start

    def _mapped(self, size: int) -> Tensor:
        try:
            with tempfile.TemporaryFile(dir=self._directory, prefix="megappo-") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises here, not as a signal later
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            folder = self._directory or tempfile.gettempdir()
            raise RunError(
                f"what rests of a role has no room in {folder}: {error.strerror}; give runtime.offload_directory a "
                f"folder with room, or switch offload off"
            ) from error


class Movable:
    """Storages that leave the device together and come back together."""

    def __init__(self, place: RestingPlace | None = None) -> None:
        """`place`: where their content is kept; None: it is lost, and storages come back uninitialised."""
        self._place = place
        self._storages: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
        """The storages that left last, by identity: the storage, its size, and its first byte in the place."""
        self._is_kept = False
        """Whether the place still has the device's content."""
        self._arrival: torch.cuda.Event | None = None
        self.is_away = False

    def leave(self, tensors: Iterable[Tensor], reserve_bytes: int = 0) -> None:
        """Move the storages of these tensors off the device; empty ones are skipped, and nothing happens while they are
        away.

        `reserve_bytes`: room that all of them will need later.
        """
        if self.is_away:
            return
        before, self._storages, end = self._storages.keys(), {}, 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in self._storages:
                self._storages[storage._cdata] = (storage, storage.nbytes(), end)
                end += storage.nbytes()
        if self._place is not None and not (self._is_kept and before == self._storages.keys()):
            self._place.reserve(max(end, reserve_bytes))
            self._copy(to_place=True)
        for storage, _, _ in self._storages.values():
            storage.resize_(0)
        self.is_away, self._is_kept = True, True

    def come_back(self, *, unchanged: bool = False) -> None:
        """Start to bring the storages back; call `arrive` before using them. `unchanged`: they are only read, so that
        nothing has to be copied when they leave again."""
        self._is_kept = self._is_kept and unchanged
        if not self.is_away:
            return
        if self._place is not None:
            _stream().synchronize()  # the memory of what left before is free from here on
        for storage, size, _ in self._storages.values():
            storage.resize_(size)
        if self._place is not None:
            self._copy(to_place=False)
            self._arrival = _stream().record_event()
        self.is_away = False

    def arrive(self) -> None:
        """Make work that is queued from here on wait for the copies of `come_back`."""
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)
            self._arrival = None

    def read(self, tensor: Tensor, elements: slice) -> Tensor | None:
        """Copy of these elements of a contiguous tensor, flattened, on its device; None where it is not away."""
        found = self._storages.get(tensor.untyped_storage()._cdata) if self.is_away else None
        if found is None or self._place is None:
            return None
        start, stop, _ = elements.indices(tensor.numel())
        copy_n = torch.empty(max(0, stop - start), dtype=tensor.dtype, device=tensor.device)
        torch.cuda.current_stream().wait_stream(_stream())
        first = found[2] + (int(tensor.storage_offset()) + start) * tensor.itemsize
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
                    flat_n.record_stream(stream)  # the memory is not reused before the copy is done


@functools.cache
def _stream() -> torch.cuda.Stream:
    """The one stream of all moves, so that what comes back waits for what left before."""
    return torch.cuda.Stream()
