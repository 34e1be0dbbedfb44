"""A worker for tools: `python -m megappo.environments.tools.tool_worker REQUESTS ANSWERS`, started by `ToolPool`.

The worker first receives a ToolChoice and answers ("ready", process id) or ("broken", reason). Then the worker
receives (number, tool, arguments), one call at a time, and answers (number, failure, text). Each call runs in a
forked process with limits and a separate folder. A call of a bare tool can write only into this folder. All processes
of a call are descendants of the worker, and end with the call.

This module must not import large packages, because the import delays the replacement of a killed worker.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import select
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import psutil

from megappo.environments.tools.confinement import confine
from megappo.plugins import load_function
from megappo.rewards.processes.channel import WorkerEnd
from megappo.rewards.processes.descendants import adopt_orphans, end_descendants, reap
from megappo.rewards.processes.variables import plain_variables
from megappo.rewards.processes.worker_main import main

LIMITS = {
    "time": "it ran out of time",
    "memory": "it used more memory than it may",
    "processes": "it started more processes than it may",
    "files": "it wrote more than it may",
    "died": "its process ended",
    "raised": "it raised",
}
"""Failures of a call, each with its text for the model."""
_POLL_SECONDS = 0.02
_LOOK_SECONDS = 0.08
"""Seconds between two checks of all descendants, which read /proc. A call that writes continuously is checked too."""
_MOST_OUTPUT_BYTES = 1 << 20
"""Maximum number of bytes in the output of a call. Larger outputs are no answers."""
_BYTES_OF_FILES = 100 * 10**6
_MOST_FILES = 5000
_STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen")
"""Python audit events for new processes. Processes that are started by other programs are counted from outside."""
_BROKEN_CHARACTERS = 4000
_SHARED_BYTES = 100 * 10**6
"""Maximum number of bytes that a fork of a worker shares with the worker. They are not charged to the call."""


class ToolChoice(NamedTuple):
    """Tools and limits of a worker."""

    functions: dict[str, str]
    timeout_seconds: float
    memory_bytes: int
    processes: int
    output_characters: int
    bare: tuple[str, ...] = ()
    """Tools that run or parse model output. Their processes get no secrets and no open files of the worker."""
    confined: bool = False
    """Whether bare tools are confined to their folder by `confine`."""


def cut(text: str, characters: int) -> str:
    """Return the text without its middle part if the text is longer than `characters`."""
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[len(text) - half :]}"


class _Call:
    """One call of a tool in a separate process."""

    def __init__(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], choice: ToolChoice, *, bare: bool
    ) -> None:
        self._choice, self._shared, self._bare = choice, mmap.mmap(-1, 2), bare
        """Bytes that are shared with all forked processes of the call: number of started processes, and whether the
        limit was exceeded."""
        self._folder = tempfile.mkdtemp(prefix="megappo-tool-")
        self._reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reader)
            self._run(function, arguments, writer)
        os.close(writer)

    def _run(self, function: Callable[..., Any], arguments: Mapping[str, Any], writer: int) -> NoReturn:
        """Run the call in its own process, which ends in this method."""
        os.setsid()
        os.chdir(self._folder)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        if self._bare:
            variables = plain_variables(os.environ)
            os.environ.clear()
            os.environ.update(variables | dict.fromkeys(("HOME", "TMPDIR", "TMP", "TEMP", "PWD"), self._folder))
            tempfile.tempdir = None  # Python caches the folder of the worker
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor != writer:
                    with suppress(OSError):  # the descriptor of the listing itself is already closed
                        os.close(descriptor)
        used_bytes = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + self._choice.memory_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_BYTES_OF_FILES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self._bare and self._choice.confined:
            confine(self._folder)
        sys.addaudithook(self._count_start)
        own = os.getpid()
        try:
            failure, text = "", str(function(**arguments))
        except MemoryError:
            failure, text = "memory", ""
        except BaseException as error:  # noqa: BLE001 - any exception of a tool is a result
            failure, text = "raised", f"{type(error).__name__}: {error}"
        if os.getpid() == own:  # False in a child process that was forked by the function
            text = cut(text, self._choice.output_characters)
            with suppress(OSError), open(writer, "wb") as out:
                out.write(json.dumps([failure, text]).encode())
        os._exit(0)

    def _count_start(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if event in _STARTS:
            if self._shared[0] >= min(self._choice.processes, 255) - 1:
                self._shared[1] = 1
                os._exit(1)
            self._shared[0] += 1

    def result(self) -> tuple[str, str]:
        """Wait for the result: (failure, text). All processes of the call have ended afterwards."""
        try:
            failure, output = self._await()
        finally:
            os.close(self._reader)
            end_descendants()
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._shared[1]:
            return "processes", ""
        if failure:
            return failure, ""
        try:
            answer: tuple[str, str] = tuple(json.loads(output))
        except (ValueError, RecursionError):
            return "died", ""
        return answer

    def _await(self) -> tuple[str, bytes]:
        """Wait until the call has ended or exceeds a limit, and return the failure and the output."""
        output, look, deadline = b"", 0.0, time.monotonic() + self._choice.timeout_seconds
        poll = select.poll()
        poll.register(self._reader, select.POLLIN | select.POLLHUP)
        while (now := time.monotonic()) < deadline:
            if poll.poll(_POLL_SECONDS * 1000):
                piece = os.read(self._reader, 1 << 16)
                if not piece:
                    return "", output
                output += piece
                if len(output) > _MOST_OUTPUT_BYTES:
                    return "died", b""
                if now < look:
                    continue
            ended = reap()
            if ended is None or self._pid in ended:  # remaining processes of the call may keep the pipe open
                return "", output + self._rest()
            if now >= look:
                look = now + _LOOK_SECONDS
                if failure := self._takes_too_much():
                    return failure, output
        return "time", output

    def _rest(self) -> bytes:
        os.set_blocking(self._reader, False)
        with suppress(BlockingIOError):
            return os.read(self._reader, 1 << 20)
        return b""

    def _takes_too_much(self) -> str:
        used_bytes, processes = 0, psutil.Process().children(recursive=True)
        for process in processes:
            with suppress(psutil.Error):
                used_bytes += process.memory_info().rss
        if len(processes) > self._choice.processes or self._shared[1]:
            return "processes"
        if used_bytes > self._choice.memory_bytes + _SHARED_BYTES * len(processes):
            return "memory"
        return "files" if _writes_too_much(self._folder, [process.pid for process in processes]) else ""


def _writes_too_much(folder: str, processes: Iterable[int]) -> bool:
    """Return whether a folder, and deleted open files of these processes, exceed the limits of a call."""
    n_bytes, places = 0, [folder, *(f"/proc/{pid}/fd" for pid in processes)]
    for number, path in enumerate(_below(places)):
        with suppress(OSError):
            status = os.stat(path) if path.startswith("/proc/") else os.lstat(path)
            is_own = stat.S_ISREG(status.st_mode) and (not path.startswith("/proc/") or not status.st_nlink)
            n_bytes += status.st_blocks * 512 if is_own else 0
        if number > _MOST_FILES or n_bytes > _BYTES_OF_FILES:
            return True
    return False


def _below(folders: list[str]) -> Iterator[str]:
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                yield entry.path
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def _serve(pool: WorkerEnd) -> None:
    """Answer calls until the pool has ended, which raises EOFError or ConnectionError."""
    choice: ToolChoice = pool.first
    try:
        functions = {name: load_function(path, f"tool '{name}'") for name, path in choice.functions.items()}
    except ValueError as error:
        pool.send(("broken", str(error)[:_BROKEN_CHARACTERS]))
        return
    adopt_orphans()
    pool.send(("ready", os.getpid()))
    while True:
        number, tool, arguments = pool.receive()
        pool.send((number, *_Call(functions[tool], arguments, choice, bare=tool in choice.bare).result()))


if __name__ == "__main__":
    main(_serve)
