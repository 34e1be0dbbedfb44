"""Checks of files of unknown origin: no devices or pipes in place of files, no links that lead elsewhere."""

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
"""Most bytes of a text that is read as a whole; the largest tokenizers have 40 MiB."""


def check_plain(path: Path, most_bytes: int | None = None) -> None:
    """Raises OSError for anything but a regular file, as reading might never end, and for a file that is too large."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    if most_bytes is not None and found.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, more than {most_bytes}", str(path))


def plain_text(path: Path) -> str:
    """The text of a file. Raises OSError as `check_plain` does, and UnicodeDecodeError."""
    check_plain(path, LARGEST_TEXT_BYTES)
    return path.read_text(encoding="utf-8")


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Open an empty file for writing. At the end of the block, the content is on the disk. Raises OSError with the name
    of the file."""
    with writing(path), path.open("wb") as file, own_errors(file) as recording:
        yield recording
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def own_errors(file: BinaryIO) -> Iterator[BinaryIO]:
    """Yields a file for torch.save. If a write fails, the block raises the OSError of the write. Without this function,
    torch.save would raise RuntimeError, for example "unexpected pos 704 vs 598" on a full disk."""
    recording = _RecordingFile(file)
    try:
        yield cast(BinaryIO, recording)
    except RuntimeError as error:
        if recording.error is None:
            raise
        raise recording.error from error


class _RecordingFile:
    """A file that keeps the last error of `write`."""

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
    """Raises ValueError where a folder has devices or pipes, for which a reader would wait, or texts that are too large
    to be read as a whole."""
    for entry in os.scandir(folder):
        try:
            found = entry.stat()
        except OSError:  # a link to nothing counts as nothing
            continue
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) or stat.S_ISSOCK(found.st_mode)):
            raise ValueError(f"{entry.path} is no plain file; remove it, or fetch the folder again")
        if entry.name.endswith((".json", ".jinja", ".txt")) and found.st_size > LARGEST_TEXT_BYTES:
            raise ValueError(
                f"{entry.path} has {found.st_size} bytes, and texts of a model have at most {LARGEST_TEXT_BYTES}; "
                "fetch the folder again"
            )


def check_own(directory: Path) -> None:
    """Raises ValueError where writing below a directory could end elsewhere, or wait: at links that lead out of it,
    pipes and devices."""
    root = directory.resolve()
    for entry in _below(directory):
        if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
            raise ValueError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, where the run would write; put in its place "
                "what it leads to"
            )
        if not (entry.is_symlink() or entry.is_dir() or entry.is_file()) and not _is_socket(entry):
            raise ValueError(f"{entry.path} is no plain file; remove it")


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
