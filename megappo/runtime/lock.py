"""Lock of a run directory, which only one job at a time may use."""

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
from megappo.files.plain_files import check_own
from megappo.observe.terminal.messages import show_message
from megappo.runtime.holder import NAME, Holder, release, take, this_process
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import attempt, broadcast_object
from megappo.runtime.waiting import wait_until

# The previous job may keep the lock for a moment while it ends.
PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.2
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class HeldDirectory:
    """A run directory that only this job writes to, until the directory is moved or replaced."""

    def __init__(self, directory: Path, file: TextIO | None, holder: Holder | None = None) -> None:
        """`file`: the open lock file on the main rank, None on other ranks. `holder`: this process, if a holder file
        replaces the lock."""
        self._directory, self._file, self._holder = directory, file, holder

    def release(self) -> None:
        """Release the directory."""
        if self._holder is not None:
            release(self._directory / NAME, self._holder)
        if self._file is not None:
            self._file.close()

    def check(self) -> None:
        """Raise RunError on every rank if the directory is gone or was replaced; a collective.

        In both cases users cannot open the log files, and another job may use the new directory.
        """
        problem = broadcast_object(_loss(self._directory, self._file) if self._file is not None else None)
        if problem is not None:
            raise RunError(problem)


def _loss(directory: Path, file: TextIO) -> str | None:
    """Return a sentence about a directory that is gone or was replaced, otherwise None."""
    try:
        if os.path.samestat(os.stat(directory / "lock"), os.fstat(file.fileno())):
            return None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return None  # a temporary error of the disk does not mean that the directory is lost
    moved = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
    if moved.name == "lock" and moved.exists():  # NFS renames an open file when the file is removed
        became, remedy = f"was moved to '{moved.parent}'", "move it back and start the run again to continue it"
    else:
        became = "or the file `lock` in it was removed or replaced"
        remedy = "restore the directory and start the run again, or start a new run"
    return (
        f"run.directory '{directory}' {became} during the run, so the run ends, because its directory may belong to "
        f"another job now; {remedy}"
    )


@contextlib.contextmanager
def locked_directory(directory: Path, runtime: Runtime, *, private: bool = False) -> Iterator[HeldDirectory]:
    """Lock `<directory>/lock`; a collective. The kernel releases the lock at any end of the job. A `private` directory
    first becomes inaccessible to other users.

    On a file system without locks, the file `lock.holder` replaces the lock (see `megappo.runtime.holder`). Raises
    ValueError on every rank if another job does not release the directory within a few seconds, or if the directory
    cannot be written. Also raises the errors of `check_own`.
    """
    locked, problem = attempt(lambda: _take(directory, private=private)) if runtime.is_main else (None, "")
    problem = broadcast_object(problem)
    if problem:
        raise ValueError(problem)
    locked = locked or HeldDirectory(directory, None)
    try:
        yield locked
    finally:
        locked.release()


def has_locks(descriptor: int) -> bool:
    """Return whether the file system of an open file supports locks. Raises OSError if this is unknown."""
    try:
        _lock(descriptor)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _take(directory: Path, *, private: bool) -> HeldDirectory:
    """Open the lock file and lock it, or create the holder file. Raises ValueError if this fails."""
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
                    f"run.directory '{directory}' is in use by {other}; wait until this job ends, stop it, or choose "
                    "another run.directory"
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        except OSError as error:
            raise ValueError(
                f"run.directory '{directory}' cannot be written or locked: {error.strerror}; free some space, repair "
                "the disk, or choose another directory"
            ) from error
        undo.pop_all()
    return HeldDirectory(directory, file, holder)


def _take_without_locks(directory: Path) -> Holder:
    """Take the directory with a holder file. Raises ValueError if the directory may be in use."""
    path, own = directory / NAME, this_process(os.environ)
    other: Holder | None = None

    def is_taken() -> bool:
        nonlocal other
        other = take(path, own)
        return other is None

    if not wait_until(is_taken, PATIENCE_SECONDS, every_seconds=_POLL_SECONDS):  # an ending job needs a moment
        assert other is not None
        raise ValueError(
            f"run.directory '{directory}' is in use by {other.summary}, according to {path} (the file system has no "
            "locks); wait until this job ends or stop it, and remove this file if the process is gone"
        )
    show_message(f"the file system of {directory} has no locks, so the file {NAME} reserves the directory for this run")
    return own


def _lock(descriptor: int) -> bool:
    """Lock the file if no other process has locked it, and return whether it is locked. Raises OSError if the file
    system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
