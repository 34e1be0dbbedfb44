"""Standard output and standard error that never end a run: closed ones, ones without a reader, and narrow encodings.

Standard library only, as every process of megappo starts with it.
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
    """A standard stream. Its output is dropped once the reader of its pipe, such as `head`, has ended."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _drop_output(self.fileno())
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Prepare the standard streams of a process that megappo starts; call this before the process opens any file.

    As `adapt_streams`. In addition, output to a pipe without a reader is dropped.
    """
    adapt_streams()
    for descriptor, name in _NAMES.items():
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _reopened(stream, descriptor))


def adapt_streams() -> None:
    """Make the standard streams usable in a process that somebody else may have started.

    Streams that the parent process closed become /dev/null. Their descriptors are opened, too: otherwise the next file
    would get such a number, and output of child processes would go into that file. See also
    `accept_any_text`.
    """
    for descriptor in (0, *_NAMES):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
    for name in _NAMES.values():
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends
        else:
            accept_any_text(stream)


def accept_any_text(stream: TextIO) -> None:
    """Have a stream write characters that its encoding lacks as `\\uXXXX`, in place of an error."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what is left of the output of a run that has ended well. A disk or pipe that does not take it changes
    nothing about the run."""
    for descriptor, name in _NAMES.items():
        try:
            getattr(sys, name).flush()
        except OSError:
            _drop_output(descriptor)  # Python flushes once more at its end
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
