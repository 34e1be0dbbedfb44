"""Checks of files of unknown origin: no devices, no pipes, and no links to other directories."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from megappo.errors import writing

LARGEST_TEXT_BYTES = 256 * 2**20
"""Maximum size of a text that is read completely. The largest tokenizers have 40 MiB."""


def check_plain(path: Path, most_bytes: int | None = None) -> None:
    """Check that a path is a regular file, because reads of other files may block. Raises OSError if the path is not a
    regular file, or if the file exceeds `most_bytes`."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "the path is not a regular file", str(path))
    if most_bytes is not None and status.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"the file has {status.st_size} bytes, more than {most_bytes}", str(path))


def plain_text(path: Path) -> str:
    """Return the text of a file. Raises OSError as `check_plain` does, and UnicodeDecodeError if the file is not
    UTF-8."""
    check_plain(path, LARGEST_TEXT_BYTES)
    return path.read_text(encoding="utf-8")


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Open an empty file for writing. The end of the block writes the content to the disk. Raises OSError with the name
    of the file."""
    with writing(path), path.open("wb") as file, own_errors(file) as recording:
        yield recording
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def own_errors(file: BinaryIO) -> Iterator[BinaryIO]:
    """Yield a file for torch.save. If a write fails, the block raises the OSError of the write. Without this function,
    torch.save would raise RuntimeError, for example "unexpected pos 704 vs 598" on a full disk."""
    recording = _RecordingFile(file)
    try:
        yield cast(BinaryIO, recording)
    except RuntimeError as error:
        if recording.error is None:
            raise
        raise recording.error from error


class _RecordingFile:
    """A file that stores the last error of `write`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def check_folder(folder: Path) -> None:
    """Check the files of a folder. Raises ValueError if the folder contains devices or pipes, because reads may block,
    or texts that are too large."""
    for entry in os.scandir(folder):
        try:
            status = entry.stat()
        except OSError:  # broken links are ignored
            continue
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
            raise ValueError(f"{entry.path} is not a regular file; remove it, or fetch the folder again")
        if entry.name.endswith((".json", ".jinja", ".txt")) and status.st_size > LARGEST_TEXT_BYTES:
            raise ValueError(
                f"{entry.path} has {status.st_size} bytes, more than {LARGEST_TEXT_BYTES}, the limit of texts; "
                "fetch the folder again"
            )


def check_own(directory: Path) -> None:
    """Check that writes below a directory stay in the directory and do not block. Raises ValueError if the directory
    contains links to other directories, pipes or devices."""
    root = directory.resolve()
    for entry in _below(directory):
        if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
            raise ValueError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, and the run would write outside its directory; "
                "replace the link by its target"
            )
        if not (entry.is_symlink() or entry.is_dir() or entry.is_file()) and not _is_socket(entry):
            raise ValueError(f"{entry.path} is not a regular file; remove it")


def _below(directory: Path) -> Iterator[os.DirEntry[str]]:
    folders = [str(directory)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def _is_socket(entry: os.DirEntry[str]) -> bool:
    return stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
