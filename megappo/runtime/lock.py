"""One job at a time in a run directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from megappo.runtime.process import Runtime

_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.2
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked_directory(directory: Path, runtime: Runtime) -> Iterator[None]:
    """Hold `<directory>/lock`, which the kernel takes back from a job that ends in whatever way; a collective.

    A file system without locks is used without. Raises ValueError on every rank where another job holds it for longer
    than a job that is ending would, or where the directory cannot be written.
    """
    file: TextIO | None = None
    problem: list[str | None] = [None]
    if runtime.is_main:
        file, problem = _take(directory)
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise ValueError(problem[0])
    try:
        yield
    finally:
        if file is not None:
            file.close()


def _take(directory: Path) -> tuple[TextIO | None, list[str | None]]:
    """The open file that holds the lock, and what is wrong."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        return None, [f"run.directory '{directory}' cannot be written: {error.strerror}; choose another, or mend it"]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                continue
            file.seek(0)
            holder = file.read().strip() or "another job"
            file.close()
            return None, [
                f"run.directory '{directory}' is in use by {holder}; wait for its end, stop it, or choose another "
                "run.directory"
            ]
        except OSError as error:
            if error.errno in _NO_LOCKS:
                break
            file.close()
            return None, [f"run.directory '{directory}' cannot be locked: {error.strerror}; choose another"]
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except OSError as error:
        file.close()
        return None, [f"run.directory '{directory}' cannot be written: {error.strerror}; make room or choose another"]
    return file, [None]
