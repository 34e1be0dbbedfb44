"""One process of the run: its rank, device and collectives."""

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
from megappo.runtime.compile_caches import rank_caches
from megappo.runtime.deadlines import Deadlines
from megappo.runtime.device import prepare_device
from megappo.runtime.failures import Failures
from megappo.runtime.groups import allow_connections, collective_backend, join_world
from megappo.runtime.heap import collect_as_usual
from megappo.runtime.launchers import Ranks, adopt_launcher, read_ranks
from megappo.runtime.meeting import meet
from megappo.runtime.nccl import share_settings
from megappo.runtime.notices import Notices
from megappo.runtime.store import another_connection
from megappo.runtime.waiting import pause, wait_until

_MOST_START_SECONDS = 1800
"""The longest that ranks wait for each other at the start."""
_LOOK_SECONDS = 0.02
"""Interval between two looks at a GPU's free memory."""


@dataclass(frozen=True)
class Memory:
    """Memory of a rank and its device in GB (1e9 bytes)."""

    peak_gigabytes: float
    """Peak of this rank: tensors on CUDA, since `peak_since` was called last; the process so far on a CPU."""
    reserved_gigabytes: float
    """Memory that this rank keeps from others: torch's allocator with its cache; on a CPU the process."""
    free_gigabytes: float
    """Free memory of the device, or of the machine on a CPU, whoever uses the rest."""


@dataclass(frozen=True)
class Runtime:
    """Rank, world size and device of this process, and what depends on them."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    local_world_size: int = 1
    """Ranks on this machine, as far as the launcher says."""
    deadlines: Deadlines = field(default_factory=lambda: Deadlines.of(RuntimeSettings()))
    store: dist.Store | None = None
    """Connection to the store of the ranks for messages outside of collectives; None: the run opens one."""

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes."""
        return self.rank == 0

    @property
    def on_cuda(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        """Backend of collectives on this rank's device."""
        return collective_backend(self.device.type)

    @property
    def device_name(self) -> str:
        """The GPU's product name, "" for a CPU."""
        return torch.cuda.get_device_name() if self.on_cuda else ""

    @functools.cached_property
    def notices(self) -> Notices:
        """Messages between ranks outside of collectives."""
        return Notices(self.store or another_connection(dist.distributed_c10d._get_default_store()))

    @functools.cached_property
    def failures(self) -> Failures:
        """Handler of this rank's errors and of those of other ranks."""
        return Failures(Ranks(self.rank, self.world_size, self.local_rank, self.local_world_size), self.notices)

    def synchronize(self) -> None:
        """Wait for the device, so that measured times of stages are true."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def release_cached_memory(self) -> None:
        """Return the cache of torch's allocator to the GPU, for other processes; on a CPU there is none.

        An engine that wakes before this call finds too little memory on a full GPU.
        """
        if self.on_cuda:
            gc.collect()  # reference cycles hold tensors
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()  # memory that other processes had opened and closed again
            torch.cuda.empty_cache()

    def await_freed_memory(self, most_seconds: float = 5.0) -> bool:
        """Wait while other processes free GPU memory, until two polls find the same amount; False where that takes
        longer."""
        if not self.on_cuda:
            return True
        seen = [torch.cuda.mem_get_info()[0]]

        def is_over() -> bool:
            seen.append(torch.cuda.mem_get_info()[0])
            return seen[-1] <= seen[-2]

        pause(_LOOK_SECONDS)
        return wait_until(is_over, most_seconds, every_seconds=_LOOK_SECONDS)

    def memory(self) -> Memory:
        """Memory that this rank and its device use now."""
        if self.on_cuda:
            free, _ = torch.cuda.mem_get_info()
            return Memory(torch.cuda.max_memory_allocated() / 1e9, torch.cuda.memory_reserved() / 1e9, free / 1e9)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Memory(peak / 1e9, _resident_bytes() / 1e9, psutil.virtual_memory().available / 1e9)

    def peak_since(self) -> float:
        """Peak memory of this rank since the last call, in GB (1e9 bytes): tensors on CUDA. A CPU knows no peak of a
        part of the run; there it is what the process has now."""
        if not self.on_cuda:
            return _resident_bytes() / 1e9
        peak = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return peak


def _resident_bytes() -> int:
    """Memory of this process, by the kernel's count of pages. It is asked for twice in each stage of a step, and psutil
    takes five times as long."""
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
            f"rank {ranks.rank} of {ranks.world_size} could not meet the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({reason(error)}); set MASTER_ADDR and MASTER_PORT to rank 0's machine and a "
            "free port of it, and ask `megappo doctor`"
        ) from error
    return other_connection


@contextlib.contextmanager
def start_runtime(
    settings: RuntimeSettings, deadlines: Deadlines | None = None, *, with_servers: bool = False
) -> Iterator[Runtime]:
    """Join the process group and prepare Megatron-Core for this machine; leave the group at the end. `deadlines`: by
    default those of the settings.

    An error of the block ends all ranks: every one of them prints it and its process ends, see `Failures`. With one
    rank it is raised instead. `Interrupted`, which all ranks raise, is always raised.

    Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`; without them the run is
    one process. `srun` and `mpirun` are understood too. Raises ValueError where `runtime.device` asks for CUDA and
    there is none or too few devices, RunError where the other ranks cannot be met.
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
    here = ranks.local_world_size or 1
    runtime = Runtime(ranks.rank, ranks.world_size, ranks.local_rank, device, here, deadlines, store)
    runtime.failures.start()
    try:
        _prepare_megatron()
        collect_as_usual()
        yield runtime
    except BaseException as error:
        runtime.failures.leave(error)
        _leave_group(runtime)
        raise
    _leave_group(runtime)


def _leave_group(runtime: Runtime) -> None:
    """Destroy the process group of a run that all ranks end at the same place; elsewhere NCCL would wait for the
    others."""
    runtime.failures.stop()
    dist.destroy_process_group()


def _prepare_megatron() -> None:
    """Create the buffer of sequence parallel gathers, the one global of Megatron that process groups do not replace.

    0.16.1 / 0.19.2 read it in dot_product_attention.py:189 and tensor_parallel/layers.py:482, 519 / 570, 614.
    """
    from megatron.core import parallel_state

    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
