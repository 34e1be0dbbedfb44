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
from megappo.observe.messages import tell
from megappo.observe.plain_files import check_own
from megappo.runtime.holder import NAME, Holder, release, take, this_process
from megappo.runtime.objects import attempt, broadcast_object
from megappo.runtime.process import Runtime
from megappo.runtime.waiting import wait_until

# A job that is ending still holds the lock for a moment.
PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.2
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class HeldDirectory:
    """A run directory that this job alone writes to, as long as it is the one that was locked."""

    def __init__(self, directory: Path, file: TextIO | None, holder: Holder | None = None) -> None:
        """`file`: the open lock file on the main rank; None on other ranks. `holder`: this process, if a file holds
        the directory instead of a lock."""
        self._directory, self._file, self._holder = directory, file, holder

    def release(self) -> None:
        """Give the directory up."""
        if self._holder is not None:
            release(self._directory / NAME, self._holder)
        if self._file is not None:
            self._file.close()

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

    On a file system without locks the file `lock.holder` holds the directory (see `megappo.runtime.holder`). Raises
    ValueError on every rank if another job does not release the directory within a few seconds, if the directory cannot
    be written, or as `check_own` does.
    """
    held, problem = attempt(lambda: _take(directory, private=private)) if runtime.is_main else (None, "")
    problem = broadcast_object(problem)
    if problem:
        raise ValueError(problem)
    held = held or HeldDirectory(directory, None)
    try:
        yield held
    finally:
        held.release()


def has_locks(descriptor: int) -> bool:
    """Whether the file system of an open file has locks. Raises OSError if this is unknown."""
    try:
        _lock(descriptor)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _take(directory: Path, *, private: bool) -> HeldDirectory:
    """Open the lock file and lock it, or create the holder's file. Raises ValueError where that fails."""
    holder = None
    with contextlib.ExitStack() as undo:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            check_own(directory)
            if private:
                directory.chmod(0o700)
            file = undo.enter_context((directory / "lock").open("a+", encoding="utf-8"))
            if not has_locks(file.fileno()):
                holder = _take_without_locks(directory)
                undo.callback(release, directory / NAME, holder)
            elif not wait_until(lambda: _lock(file.fileno()), PATIENCE_SECONDS, every_seconds=_POLL_SECONDS):
                file.seek(0)
                other = file.read().strip() or "another job"
                raise ValueError(
                    f"run.directory '{directory}' is in use by {other}; wait for its end, stop it, or choose another "
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
    return HeldDirectory(directory, file, holder)


def _take_without_locks(directory: Path) -> Holder:
    """Hold the directory with a file. Raises ValueError if the directory may be in use."""
    path, own = directory / NAME, this_process(os.environ)
    other: Holder | None = None

    def is_taken() -> bool:
        nonlocal other
        other = take(path, own)
        return other is None

    if not wait_until(is_taken, PATIENCE_SECONDS, every_seconds=_POLL_SECONDS):  # an ending job needs a moment
        assert other is not None
        raise ValueError(
            f"run.directory '{directory}' is in use by {other.summary}, as {path} says (the file system has no locks); "
            "wait for its end or stop it, and remove this file if the process is gone"
        )
    tell(f"the file system of {directory} has no locks, so the file {NAME} holds the directory for this run")
    return own


def _lock(descriptor: int) -> bool:
    """Whether the file is locked now. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
