"""Lock of a run directory: one job at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from megappo.errors import RunError
from megappo.observe.plain_files import check_own
from megappo.runtime.objects import attempt, broadcast_object
from megappo.runtime.process import Runtime
from megappo.runtime.waiting import wait_until

# A job that is ending still holds the lock for a moment.
PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.2
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class HeldDirectory:
    """A run directory that this job alone writes to, as long as it is the one that was locked."""

    def __init__(self, directory: Path, file: TextIO | None) -> None:
        """`file`: the open lock file on the main rank; None on the others."""
        self._directory, self._file = directory, file

    def check(self) -> None:
        """Raise RunError on every rank where the directory is gone or replaced by another; a collective.

        Log files would then be written to where nobody can open them, and another job may use the other folder.
        """
        problem = broadcast_object(_loss(self._directory, self._file) if self._file is not None else None)
        if problem is not None:
            raise RunError(problem)


def _loss(directory: Path, file: TextIO) -> str | None:
    """Sentence on what happened to a directory that is gone or was replaced; None where it is still there."""
    try:
        if os.path.samestat(os.stat(directory / "lock"), os.fstat(file.fileno())):
            return None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return None  # a disk that does not answer for a moment has not lost the directory
    moved = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
    if moved.name == "lock" and moved.exists():  # NFS keeps an open file under another name where it was removed
        became, remedy = f"was moved to '{moved.parent}'", "move it back and start again, which continues the run"
    else:
        became = "or the file `lock` in it was removed or replaced"
        remedy = "bring back what was in it and start again, or begin the run anew"
    return (
        f"run.directory '{directory}' {became} while the run was going on, which ends here, as it would log and save "
        f"where another job may be; {remedy}"
    )


@contextlib.contextmanager
def locked_directory(directory: Path, runtime: Runtime, *, private: bool = False) -> Iterator[HeldDirectory]:
    """Hold `<directory>/lock`; a collective. The kernel releases the lock however the job ends. A `private` directory
    is closed to other users first.

    On a file system without locks there is no lock. Raises ValueError on every rank where another job holds it for
    longer than a job that is ending would, where the directory cannot be written, or as `check_own` does.
    """
    file, problem = attempt(lambda: _take(directory, private=private)) if runtime.is_main else (None, "")
    problem = broadcast_object(problem)
    if problem:
        raise ValueError(problem)
    try:
        yield HeldDirectory(directory, file)
    finally:
        if file is not None:
            file.close()


def _take(directory: Path, *, private: bool) -> TextIO:
    """Open the lock file and lock it. Raises ValueError where that fails."""
    with contextlib.ExitStack() as undo:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            check_own(directory)
            if private:
                directory.chmod(0o700)
            file = undo.enter_context((directory / "lock").open("a+", encoding="utf-8"))
            if not wait_until(lambda: _lock(file), PATIENCE_SECONDS, every_seconds=_POLL_SECONDS):
                file.seek(0)
                holder = file.read().strip() or "another job"
                raise ValueError(
                    f"run.directory '{directory}' is in use by {holder}; wait for its end, stop it, or choose another "
                    "run.directory"
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        except OSError as error:
            raise ValueError(
                f"run.directory '{directory}' cannot be written or locked: {error.strerror}; make room, choose "
                "another, or fix it"
            ) from error
        undo.pop_all()
    return file


def _lock(file: TextIO) -> bool:
    """Whether the file is locked now; True also where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
