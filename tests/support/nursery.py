"""Fork programs from a process that has imported their modules, because imports take most of a start.

harness.py starts this process with the descriptor of one end of a `multiprocessing.Pipe` for jobs. The answer to a
job is its process id, then its exit code. The process ends when the other end of the pipe is closed.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch.distributed.checkpoint  # noqa: F401 - imported once for all jobs
import transformers.generation  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

import megappo.ppo.run  # noqa: F401
from megappo.network.store import free_port
from megappo.runtime.memory.allocator import with_room_for_frames

with suppress(ImportError):  # Megatron-Core 0.19 imports this module for every optimizer; 0.16 does not have it
    importlib.import_module("megatron.core.models.mimo")
_GRACE_SECONDS = 20.0
_FORK = multiprocessing.get_context("fork")


class Job(NamedTuple):
    """A program to run."""

    program: str
    """A file or the name of a package."""
    arguments: list[str]
    processes: int
    """Number of processes with the variables of torchrun; with 0, one process runs without these variables."""
    stdout: str
    stderr: str
    """Paths of the output files."""
    environment: dict[str, str] | None
    """All environment variables. By default, a job inherits the variables of the nursery. The paths in `PYTHONPATH`
    come first on the import path."""


def run_program(job: Job, rank: int, port: int) -> None:
    """Run one process of a job."""
    if job.environment is not None:
        os.environ.clear()
        os.environ.update(job.environment)
        sys.path[:0] = job.environment.get("PYTHONPATH", "").split(os.pathsep)
    if count := job.processes:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [job.program, *job.arguments]
    if Path(job.program).is_file():
        run: Callable[[], object] = functools.partial(runpy.run_path, job.program, run_name="__main__")
    else:
        run = functools.partial(runpy.run_module, job.program, run_name="__main__", alter_sys=True)
    with_room_for_frames(run)


def run_job(job: Job) -> None:
    """Run a job in a separate session and exit with the code of the first failed process."""
    os.setsid()
    for stream, path in ((0, os.devnull), (1, job.stdout), (2, job.stderr)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, stream)
        os.close(opened)
    if not job.processes:
        return run_program(job, 0, 0)
    port = free_port("127.0.0.1")
    ranks = [_FORK.Process(target=run_program, args=(job, r, port)) for r in range(job.processes)]
    for process in ranks:
        process.start()
    while any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks):
        time.sleep(0.05)
    failed = [p.exitcode for p in ranks if p.exitcode]
    deadline = time.monotonic() + _GRACE_SECONDS  # all ranks end with the same error
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()) if failed else None)
        process.kill()
        process.join()
    sys.exit(failed[0] if failed else 0)


def serve(jobs: Connection[int | None, tuple[object, ...]]) -> None:
    """Run jobs in sequence until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, which ends this process
    while True:
        try:
            job = Job._make(jobs.recv())
        except EOFError:
            return
        child = _FORK.Process(target=run_job, args=(job,))
        child.start()
        jobs.send(child.pid)
        child.join()
        jobs.send(child.exitcode)


def main() -> None:
    """Serve the process that started this one."""
    serve(Connection(int(sys.argv[1])))
