"""Writer of torch for distributed checkpoints, with errors of the disk as OSError."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from megappo.errors import writing
from megappo.files.plain_files import own_errors


class _Files(FileSystem):
    """Files of a checkpoint. An error of the disk is an OSError with the name of the file."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with writing(path), super().create_stream(path, mode) as file, own_errors(cast(BinaryIO, file)) as recording:
            yield cast(io.IOBase, recording)


def storage_writer(folder: Path) -> FileSystemWriter:
    """Return the writer of torch for a folder."""
    writer = FileSystemWriter(folder)
    writer.fs = _Files()
    return writer
