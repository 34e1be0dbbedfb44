"""A file that grows by complete pieces, even if the disk is temporarily full."""

from __future__ import annotations

import os
from pathlib import Path

from megappo.errors import writing


class AppendedFile:
    """Appends complete pieces. A partly written piece is removed before the next piece is written."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending. A missing file is created. Raises OSError if the file cannot be written."""
        self._path, self._file = path, path.open("ab", buffering=0)
        self._torn_at: int | None = None

    def append(self, piece: bytes) -> None:
        """Write a complete piece without buffering. Raises OSError."""
        size = os.fstat(self._file.fileno()).st_size
        if self._torn_at is not None:
            size = min(size, self._torn_at)  # the user may have emptied the file to free space
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
