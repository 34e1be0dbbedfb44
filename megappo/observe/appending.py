"""A file that grows by whole pieces, even if its disk is full for a while."""

from __future__ import annotations

import os
from pathlib import Path

from megappo.errors import writing


class AppendedFile:
    """Appends whole pieces: a partly written piece is cut off before the next one."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending, and create it where it is missing. Raises OSError where it cannot be written."""
        self._path, self._file = path, path.open("ab", buffering=0)
        self._torn_at: int | None = None

    def append(self, piece: bytes) -> None:
        """Write the whole piece, so that it can be read at once. Raises OSError."""
        size = os.fstat(self._file.fileno()).st_size
        if self._torn_at is not None:
            size = min(size, self._torn_at)  # somebody may have emptied the file to make room
            self._file.truncate(size)
            self._torn_at = None
        try:
            written = 0
            with writing(self._path):
                while written < len(piece):
                    written += self._file.write(piece[written:])
        except OSError:
            self._torn_at = size
            raise

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()
