"""Forks programs off one process that has imported what they import, which is most of a start.

harness.py starts it, and gives it the descriptor of one end of a `multiprocessing.Pipe` through which jobs come; each
is answered with its process id and then with its exit code. Ends when the other end is closed.
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
from megappo.runtime.heap import with_room_for_frames
from megappo.runtime.store import free_port

with suppress(ImportError):  # Megatron-Core 0.19 imports it for every optimizer; 0.16 has none
    importlib.import_module("megatron.core.models.mimo")
_GRACE_SECONDS = 20.0
_FORK = multiprocessing.get_context("fork")


class Job(NamedTuple):
    """A program to be run."""

    program: str
    """A file, or the name of a package."""
    arguments: list[str]
    processes: int
    """How many, with torchrun's variables; 0 for one without them."""
    stdout: str
    stderr: str
    """Files."""
    environment: dict[str, str] | None
    """All variables; None for the nursery's own. What `PYTHONPATH` names comes first on the import path."""


def run_program(job: Job, rank: int, port: int) -> None:
    """What one process of a job does."""
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
    """Runs in a session of its own, ends with the code of the first process that failed."""
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
    """Run one job after the other until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, which ends this
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
    """Serve whoever has started this process."""
    serve(Connection(int(sys.argv[1])))
