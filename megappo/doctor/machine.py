"""Checks of the processor, memory, limits, disk and clock of one machine."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megappo.config import Config
from megappo.doctor.findings import Finding, broken, fine, slow
from megappo.plan.bytes.shared_memory import SHARED_MEMORY
from megappo.runtime.holder import NAME
from megappo.runtime.launchers import Ranks
from megappo.runtime.lock import has_locks
from megappo.runtime.memory.memory_limits import memory_limit

# Docker containers have 64 MB by default (--shm-size), which is too little for buffers of NCCL and engines.
_SHARED_BYTES = 1 << 30
_OPEN_FILES = 4096
_PROCESSES = 4096
_WRITTEN_BYTES = 64 << 20
_DISK_BYTES_PER_SECOND = 100e6
_FREE_DISK_BYTES = 2e9
_FILE_CLOCK_SECONDS = 2.0
_MEMORY_BYTES = 2e9


def machine_findings(config: Config | None, ranks: Ranks) -> Iterator[Finding]:
    """Yield findings on this machine, except on its GPUs."""
    local_ranks = ranks.local_world_size or ranks.world_size
    yield processors(local_ranks, config)
    yield memory(local_ranks)
    yield shared_memory(SHARED_MEMORY)
    yield from limits()
    yield from disk(config.run.path if config is not None else Path())


def processors(local_ranks: int, config: Config | None) -> Finding:
    """Return a finding on the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    threads = config.runtime.threads_per_rank if config is not None else None
    required = local_ranks * (threads or 1)
    text = f"{cores} cores for {local_ranks} rank{'s' if local_ranks > 1 else ''}"
    if cores < required:
        text += f" of {threads} threads" if threads else ""
        return slow("processor", text, "start fewer ranks, or request more (sbatch --cpus-per-task, docker --cpus)")
    return fine("processor", text)


def memory(local_ranks: int) -> Finding:
    """Return a finding on the free memory of the machine within the limits of control groups (SLURM, containers)."""
    import psutil

    limit = memory_limit()
    available = min(float(psutil.virtual_memory().available), limit.free_bytes)
    text = f"{available / 1e9:.0f} GB free for {local_ranks} rank{'s' if local_ranks > 1 else ''}"
    if limit.total_bytes < psutil.virtual_memory().total:
        text += f", within a limit of {limit.total_bytes / 1e9:.3g} GB (SLURM's --mem, or a container)"
    if available < _MEMORY_BYTES * local_ranks:
        return slow("memory", text, f"free some memory: a rank uses {_MEMORY_BYTES / 1e9:g} GB before it loads a model")
    return fine("memory", text)


def shared_memory(folder: Path) -> Finding:
    """Return a finding on shared memory for the buffers of NCCL, reward workers and engines."""
    remedy = "start the container with --ipc=host or --shm-size=16g, or mount a larger tmpfs at this path"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return broken("shared memory", f"{folder} is not a writable folder", remedy)
    usage = shutil.disk_usage(folder)
    text = f"{folder} has {usage.free / 1e9:.3g} of {usage.total / 1e9:.3g} GB free"
    if usage.total < _SHARED_BYTES:
        return broken("shared memory", text, remedy)
    if usage.free < _SHARED_BYTES:
        return slow("shared memory", text, f"remove the files of earlier runs in {folder}")
    return fine("shared memory", text)


def limits() -> Iterator[Finding]:
    """Yield findings on process limits that are too low for large runs."""
    findings = []
    files, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _OPEN_FILES:
        able = hard_files == resource.RLIM_INFINITY or hard_files >= _OPEN_FILES
        how = f"ulimit -n {_OPEN_FILES}" if able else "raise nofile in /etc/security/limits.conf"
        findings.append(slow("limits", f"{files} open files, fewer than {_OPEN_FILES}", how))
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if processes != resource.RLIM_INFINITY and processes < _PROCESSES:
        findings.append(slow("limits", f"{processes} processes, fewer than {_PROCESSES}", f"ulimit -u {_PROCESSES}"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
        text = f"{locked / 1e6:g} MB of locked memory are too few for NCCL to use the InfiniBand of this machine"
        findings.append(slow("limits", text, "ulimit -l unlimited (containers: --ulimit memlock=-1)"))
    yield from findings
    if not findings:
        yield fine("limits", f"open files {_format_limit(files)}, processes {_format_limit(processes)}")


def _format_limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def disk(run_directory: Path) -> Iterator[Finding]:
    """Yield findings on the disk of the run directory: write permission, speed, free space, locks, and the clock of
    the file server."""
    folder = run_directory.absolute()
    while not folder.exists():
        folder = folder.parent
    remedy = "choose another run.directory, or fix its permissions"
    if not folder.is_dir():
        yield broken("disk", f"{folder} is a file, but run.directory {run_directory} needs a folder", remedy)
        return
    try:
        speed, skew, locks = _write(folder)
    except OSError as error:
        full = error.errno in (28, 122)  # no space left, quota exceeded
        yield broken("disk", f"{folder} cannot be written: {error.strerror}", "free some space" if full else remedy)
        return
    free = shutil.disk_usage(folder).free
    text = f"{folder}: {speed / 1e6:.0f} MB/s, {free / 1e9:.0f} GB free"
    if free < _FREE_DISK_BYTES:
        yield broken("disk", text, f"free some space: small runs write up to {_FREE_DISK_BYTES / 1e9:g} GB")
    elif speed < _DISK_BYTES_PER_SECOND:
        faster = f"put run.directory on a disk of {_DISK_BYTES_PER_SECOND / 1e6:g} MB/s or more"
        yield slow("disk", text, faster)
    else:
        yield fine("disk", text)
    if not locks:
        text = f"the file system of {folder} has no locks; the file {NAME} replaces the lock of a run directory"
        yield slow("disk", text, f"remove {NAME} after a run was killed on another machine, or change the disk")
    if abs(skew) > _FILE_CLOCK_SECONDS:
        yield slow("file clock", f"files in {folder} are dated {skew:+.1f} seconds off", "set the clocks by NTP")


def _write(folder: Path) -> tuple[float, float, bool]:
    """Return the write speed in bytes per second, the lead of the file server's clock in seconds, and whether the file
    system supports locks."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".megappo-doctor-") as file:
        start = time.perf_counter()
        for _ in range(_WRITTEN_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        os.utime(file.name)
        return _WRITTEN_BYTES / seconds, os.stat(file.name).st_mtime - time.time(), has_locks(file.fileno())
