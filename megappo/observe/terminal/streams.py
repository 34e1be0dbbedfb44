"""Protects a run from standard streams that are closed, have no reader, or have a limited encoding.

This module only imports the standard library, because every process of megappo imports it first.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NAMES = {1: "stdout", 2: "stderr"}


class _Output(io.FileIO):
    """A standard stream. After the reader of a pipe, such as `head`, ends, the output is dropped."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _drop_output(self.fileno())
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Prepare the standard streams of a process of megappo. The process must call this function before the process
    opens a file.

    Does the same as `adapt_streams`. In addition, output to a pipe without a reader is dropped.
    """
    adapt_streams()
    for descriptor, name in _NAMES.items():
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _reopened(stream, descriptor))


def adapt_streams() -> None:
    """Make the standard streams usable in any process.

    If the parent process closed a stream, the stream becomes /dev/null. The descriptor is opened as well. Otherwise the
    next file would get the number of the descriptor, and child processes would write their output into this file. All
    streams accept any text (`accept_any_text`).
    """
    for descriptor in (0, *_NAMES):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is the number of this descriptor
            os.set_inheritable(descriptor, True)
    for name in _NAMES.values():
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends
        else:
            accept_any_text(stream)


def accept_any_text(stream: TextIO) -> None:
    """Make a stream write `\\uXXXX` for characters that the encoding of the stream does not support."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write the buffered output at the end of the process. Errors of the disk or the pipe are ignored, because the
    process has finished its work."""
    for descriptor, name in _NAMES.items():
        try:
            getattr(sys, name).flush()
        except OSError:
            _drop_output(descriptor)  # Python flushes the stream again when the process exits
            with suppress(OSError):
                getattr(sys, name).flush()


def _drop_output(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _reopened(stream: io.TextIOWrapper, descriptor: int) -> TextIO:
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(descriptor, "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
