"""A process of the run: rank, device and collectives."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import torch
import torch.distributed as dist

from megappo.config.schema import RuntimeSettings
from megappo.errors import RunError, reason
from megappo.network.store import another_connection
from megappo.runtime.compile_caches import rank_caches
from megappo.runtime.device import prepare_device
from megappo.runtime.launchers import Ranks, adopt_launcher, read_ranks
from megappo.runtime.memory.allocator import collect_as_usual
from megappo.runtime.ranks.groups import allow_connections, collective_backend, join_world
from megappo.runtime.ranks.meeting import meet
from megappo.runtime.ranks.nccl import share_settings
from megappo.runtime.waiting import pause, wait_until
from megappo.runtime.watch.deadlines import Deadlines
from megappo.runtime.watch.failures import Failures
from megappo.runtime.watch.notices import Notices

_MOST_START_SECONDS = 1800
"""Longest time that ranks wait for each other at the start."""
_LOOK_SECONDS = 0.02
"""Interval between two measurements of the free memory of a GPU."""


@dataclass(frozen=True)
class Memory:
    """Memory of a rank and of its device in GB (1e9 bytes)."""

    peak_gigabytes: float
    """Peak memory of this rank. On CUDA: of tensors since the last call of `peak_since`. On a CPU: of the process."""
    reserved_gigabytes: float
    """Memory that other processes cannot use: torch's allocator with its cache on CUDA, the process on a CPU."""
    free_gigabytes: float
    """Free memory of the device, or of the machine on a CPU."""


@dataclass(frozen=True)
class Runtime:
    """Rank, world size and device of this process, and objects that depend on them."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    local_world_size: int = 1
    """Ranks on this machine; 1 if the launcher does not report the number."""
    deadlines: Deadlines = field(default_factory=lambda: Deadlines.of(RuntimeSettings()))
    store: dist.Store | None = None
    """Connection to the store of the ranks for messages outside of collectives; None: the run opens a connection."""

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    @property
    def on_cuda(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        """Backend of collectives on the device of this rank."""
        return collective_backend(self.device.type)

    @property
    def device_name(self) -> str:
        """Product name of the GPU, "" on a CPU."""
        return torch.cuda.get_device_name() if self.on_cuda else ""

    @functools.cached_property
    def notices(self) -> Notices:
        """Messages between ranks outside of collectives."""
        return Notices(self.store or another_connection(dist.distributed_c10d._get_default_store()))

    @functools.cached_property
    def failures(self) -> Failures:
        """Handler for errors of this rank and of other ranks."""
        return Failures(Ranks(self.rank, self.world_size, self.local_rank, self.local_world_size), self.notices)

    def synchronize(self) -> None:
        """Wait for the device, so that measured times of stages are correct."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def release_cached_memory(self) -> None:
        """Return the cache of torch's allocator to the GPU for other processes. A CPU has no such cache.

        An engine that wakes before this call finds too little free memory on a full GPU.
        """
        if self.on_cuda:
            gc.collect()  # reference cycles hold tensors
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()  # memory that other processes have closed
            torch.cuda.empty_cache()

    def await_freed_memory(self, most_seconds: float = 5.0) -> bool:
        """Wait while other processes free GPU memory, until two measurements are equal. Returns False if this takes
        more than `most_seconds` seconds."""
        if not self.on_cuda:
            return True
        seen = [torch.cuda.mem_get_info()[0]]

        def is_over() -> bool:
            seen.append(torch.cuda.mem_get_info()[0])
            return seen[-1] <= seen[-2]

        pause(_LOOK_SECONDS)
        return wait_until(is_over, most_seconds, every_seconds=_LOOK_SECONDS)

    def memory(self) -> Memory:
        """Return the current memory of this rank and its device."""
        if self.on_cuda:
            free, _ = torch.cuda.mem_get_info()
            return Memory(torch.cuda.max_memory_allocated() / 1e9, torch.cuda.memory_reserved() / 1e9, free / 1e9)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Memory(peak / 1e9, _resident_bytes() / 1e9, psutil.virtual_memory().available / 1e9)

    def peak_since(self) -> float:
        """Return the peak memory of tensors of this rank on CUDA since the last call, in GB (1e9 bytes).

        A CPU has no peak for a part of the run. There the function returns the current memory of the process.
        """
        if not self.on_cuda:
            return _resident_bytes() / 1e9
        peak = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return peak


def _resident_bytes() -> int:
    """Return the memory of this process from the page count of the kernel. Each stage of a step calls this function
    twice, and psutil takes five times as long."""
    with open("/proc/self/statm", "rb") as counts:
        return int(counts.read().split()[1]) * resource.getpagesize()


def _join(deadlines: Deadlines, device: torch.device, ranks: Ranks) -> dist.Store:
    """Connect to the other ranks, and join the process group. Returns a second connection to the store. Raises RunError
    if the connection fails."""
    allow_connections()
    timeout = datetime.timedelta(seconds=deadlines.collective_seconds)
    patience = min(timeout, datetime.timedelta(seconds=_MOST_START_SECONDS))
    try:
        store, other_connection = meet(ranks, patience)
        join_world(device.type, ranks, timeout, store)
    except (dist.DistError, OSError) as error:
        raise RunError(
            f"rank {ranks.rank} of {ranks.world_size} could not connect to the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({reason(error)}); set MASTER_ADDR and MASTER_PORT to rank 0's machine and a "
            "free port on it, and run `megappo doctor`"
        ) from error
    return other_connection


@contextlib.contextmanager
def start_runtime(
    settings: RuntimeSettings, deadlines: Deadlines | None = None, *, with_servers: bool = False
) -> Iterator[Runtime]:
    """Join the process group, which is destroyed at the end of the block. `deadlines`: by default from the settings.

    With several ranks, an error in the block ends the processes of all ranks, and every rank prints the error (see
    `Failures`). With one rank, the error is raised. All ranks raise `Interrupted` at the same point, so this exception
    is always raised.

    Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, or the variables of
    `srun` or `mpirun`. Without these variables the run is a single process. Raises ValueError if `runtime.device` does
    not match the machine. Raises RunError if there are too few devices, or if the other ranks cannot be reached.
    """
    adopt_launcher(os.environ)
    ranks = read_ranks(os.environ)
    os.environ.update(rank_caches(os.environ))
    if with_servers:
        share_settings(os.environ)
    device = prepare_device(settings, ranks)
    deadlines = deadlines if deadlines is not None else Deadlines.of(settings)
    if "MASTER_ADDR" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # a single process: any free port
    store = _join(deadlines, device, ranks)
    local_ranks = ranks.local_world_size or 1
    runtime = Runtime(ranks.rank, ranks.world_size, ranks.local_rank, device, local_ranks, deadlines, store)
    runtime.failures.start()
    try:
        collect_as_usual()
        yield runtime
    except BaseException as error:
        runtime.failures.leave(error)
        _leave_group(runtime)
        raise
    _leave_group(runtime)


def _leave_group(runtime: Runtime) -> None:
    """Destroy the process group after an end that all ranks reach at the same point. Otherwise NCCL would wait for the
    other ranks."""
    runtime.failures.stop()
    dist.destroy_process_group()
