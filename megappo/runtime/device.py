"""The device of a rank and its preparation. Runs on GPUs and runs on CPUs first differ in this module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from megappo.config.schema import RuntimeSettings
from megappo.errors import RunError
from megappo.runtime.launchers import Ranks, binds_one_device
from megappo.runtime.memory.allocator import keep_freed_memory

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with options of torch's allocator."""


def runs_on_cuda(settings: RuntimeSettings) -> bool:
    """Return whether a run with these settings would compute on GPUs of this machine."""
    return settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())


def sees_one_device(visible: int) -> bool:
    """Return whether the launcher assigned one device to each rank. `visible` is the number of devices that this rank
    sees. The assigned device has index 0 on every rank."""
    return visible == 1 and binds_one_device(os.environ)


def device_index(ranks: Ranks, visible: int) -> int:
    """Return the CUDA device index of a rank. `visible` is the number of devices that this rank sees.

    Raises RunError if the machine has fewer devices than ranks.
    """
    if sees_one_device(visible):
        return 0
    needed = max(ranks.local_rank + 1, ranks.local_world_size or 0)
    if needed > visible:
        raise RunError(
            f"{needed} ranks are on this machine, which has {visible} visible CUDA device{'s' if visible > 1 else ''}; "
            f"start at most {visible} per machine"
        )
    return ranks.local_rank


def device_bytes() -> float:
    """Return the memory of GPU 0 in bytes, or 0 without CUDA. All GPUs of the machine are assumed to be equal."""
    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0.0


def own_device(ranks: Ranks) -> torch.device:
    """Return the device of this process and make it CUDA's current device.

    Raises RunError if the machine has fewer devices than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", device_index(ranks, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def thread_pool(workers: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of threads with the CUDA device of the caller. By default, each new thread has device 0."""
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(workers, thread_name_prefix=name)
    device = torch.cuda.current_device()
    return ThreadPoolExecutor(workers, thread_name_prefix=name, initializer=torch.cuda.set_device, initargs=(device,))


def allocator_options(options: str) -> dict[str, str]:
    """Return the options in the value of a variable of torch's allocator, by name."""
    pairs = (option.partition(":") for option in options.split(",") if option.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


@contextmanager
def plain_segments() -> Iterator[None]:
    """Allocate GPU memory that other processes can open by CUDA IPC within the context, even with
    `expandable_segments`.

    torch shares expandable segments as file descriptors of this process. `ptrace_scope` or a container may prevent
    other processes from opening them.
    """
    options_of_variables = [allocator_options(os.environ.get(name, "")) for name in ALLOCATOR_VARIABLES]
    if not any(options.get("expandable_segments", "").lower() == "true" for options in options_of_variables):
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def check_device(settings: RuntimeSettings) -> None:
    """Raise ValueError if the settings select a different kind of device than this machine has."""
    if runs_on_cuda(settings) != torch.cuda.is_available():
        if settings.device == "cuda":
            raise ValueError("runtime.device is cuda, but this machine shows no CUDA device; use runtime.device: cpu")
        raise ValueError("runtime.device is cpu on a machine with CUDA; set CUDA_VISIBLE_DEVICES= to hide the devices")


def share_cores() -> None:
    """Use the scheduling policy SCHED_BATCH of Linux, under which a thread does not preempt a thread that computes.

    Later threads and child processes inherit the policy. On other systems this function does nothing.

    Ranks on a CPU share cores, and gloo wakes a thread for every message. If the lock of the connection is taken, the
    thread retries at once (gloo/transport/tcp/pair.cc:653). The thread then spins until the preempted holder of the
    lock runs again. These retries took a tenth of the CPU time of four ranks on two cores
    (benchmarks/results/2026-11-27-ranks-on-shared-cores.md).
    """
    # A different policy was chosen by the parent process and is not changed.
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # a sandbox may forbid the change, which affects only the speed
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def prepare_device(settings: RuntimeSettings, ranks: Ranks) -> torch.device:
    """Prepare the device of a rank for Megatron-Core, and return it.

    Raises ValueError if the settings select a different kind of device. Raises RunError if the machine has fewer
    devices than ranks.
    """
    check_device(settings)
    # Megatron's tensor parallel layers overlap communication and computation, which relies on launch order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = own_device(ranks)
    if device.type == "cpu":
        cores, local_ranks = len(os.sched_getaffinity(0)), ranks.local_world_size or ranks.world_size
        torch.set_num_threads(settings.threads_per_rank or max(1, cores // local_ranks))
        # Compiled fusions do not help on gloo, and they cost seconds for every new shape.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        keep_freed_memory()
        share_cores()
    return device
