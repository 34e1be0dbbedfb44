"""The device of a rank and its preparation: where runs on GPUs and on CPUs begin to differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from megappo.config.schema import RuntimeSettings
from megappo.errors import RunError
from megappo.runtime.heap import keep_freed_memory
from megappo.runtime.launchers import Ranks, binds_one_device

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with options of torch's allocator."""


def runs_on_cuda(settings: RuntimeSettings) -> bool:
    """Whether a run of these settings would compute on GPUs here."""
    return settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())


def sees_one_device(visible: int) -> bool:
    """Whether each rank, where it sees this many devices, was given one of its own. That device is number 0 on every
    rank."""
    return visible == 1 and binds_one_device(os.environ)


def device_index(ranks: Ranks, visible: int) -> int:
    """CUDA device index of a rank on a machine with this many visible devices. Raises RunError where there are too
    few."""
    if sees_one_device(visible):
        return 0
    needed = max(ranks.local_rank + 1, ranks.local_world_size or 0)
    if needed > visible:
        raise RunError(
            f"{needed} ranks stand on this machine, which shows {visible} CUDA device{'s' if visible > 1 else ''}; "
            f"start at most {visible} per machine"
        )
    return ranks.local_rank


def device_bytes() -> float:
    """Memory of a GPU of this machine in bytes (all are assumed alike); 0 without CUDA."""
    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0.0


def own_device(ranks: Ranks) -> torch.device:
    """Device of this process, made CUDA's current one. Raises RunError where there are too few."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", device_index(ranks, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def thread_pool(workers: int, name: str) -> ThreadPoolExecutor:
    """Threads whose current CUDA device is the caller's: CUDA keeps it per thread, and each starts with device 0."""
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(workers, thread_name_prefix=name)
    device = torch.cuda.current_device()
    return ThreadPoolExecutor(workers, thread_name_prefix=name, initializer=torch.cuda.set_device, initargs=(device,))


def allocator_options(options: str) -> dict[str, str]:
    """Options of torch's allocator by name, from the value of one of its variables."""
    pairs = (option.partition(":") for option in options.split(",") if option.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


@contextmanager
def plain_segments() -> Iterator[None]:
    """Within the context torch allocates GPU memory that other processes can open by CUDA IPC, even with
    `expandable_segments`.

    Expandable segments are shared as file descriptors of this process, which `ptrace_scope` and containers may keep
    others from taking.
    """
    told = [allocator_options(os.environ.get(name, "")) for name in ALLOCATOR_VARIABLES]
    if not any(options.get("expandable_segments", "").lower() == "true" for options in told):
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def check_device(settings: RuntimeSettings) -> None:
    """Raises ValueError where the settings ask for another kind of device than this machine has."""
    if runs_on_cuda(settings) != torch.cuda.is_available():
        if settings.device == "cuda":
            raise ValueError("runtime.device is cuda, but this machine shows no CUDA device; use runtime.device: cpu")
        raise ValueError("runtime.device is cpu on a machine with CUDA; set CUDA_VISIBLE_DEVICES= to hide the devices")


def share_cores() -> None:
    """Let threads of this process wait for their turn rather than preempt one that computes (SCHED_BATCH of Linux;
    elsewhere this does nothing). Threads and processes that it starts later do so, too.

    On a CPU ranks share cores, and gloo wakes a thread for every message. One that finds the lock of its connection
    taken tries again at once (gloo/transport/tcp/pair.cc:653), for as long as the holder that it has preempted does not
    run: a tenth of the CPU time of four ranks on two cores (benchmarks/results/2026-11-27-ranks-on-shared-cores.md).
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:  # or whoever started it chose another
        with suppress(OSError):  # where a sandbox forbids it; a run does the same without
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def prepare_device(settings: RuntimeSettings, ranks: Ranks) -> torch.device:
    """Device of a rank, ready for Megatron-Core. Raises ValueError where the settings ask for another kind."""
    check_device(settings)
    # Megatron's tensor parallel layers overlap communication and computation, which relies on launch order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = own_device(ranks)
    if device.type == "cpu":
        cores, here = len(os.sched_getaffinity(0)), ranks.local_world_size or ranks.world_size
        torch.set_num_threads(settings.threads_per_rank or max(1, cores // here))
        # Compiled fusions bring nothing on gloo and cost seconds at every new shape.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        keep_freed_memory()
        share_cores()
        from megappo.runtime.megatron_cpu import install

        install()
    return device
