"""Faults on one rank of a run at a point between two collectives. A trace of the functions on a rank finds such
points. A point is the start of a function of megappo after a number of collectives of the thread."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megappo.checkpoint.files import finished
from megappo.files.appending import AppendedFile
from tests.support.places import ROOT

FAULTS = ("raise", "full", "full once", "kill", "stop", "nap", "hang")
"""An error; a full disk, permanently or for one file; SIGKILL and SIGTERM; a short sleep and an endless sleep."""
NAP_SECONDS = 2.0
FAULT_MESSAGE = "the fault of this test"
_FOREVER = 10**6
_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "destroy_process_group", "gather",
    "gather_object", "init_process_group", "irecv", "isend", "monitored_barrier", "new_group", "recv",
    "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list",
)  # fmt: skip
_FIRST, _LAST = "init_process_group", "destroy_process_group"
_PASSED_ON = {"megappo/runtime/ranks/objects.py", "megappo/runtime/ranks/exchange.py", "megappo/runtime/ranks/tally.py"}
"""Files between a collective and its caller."""
_MONITORING: Any = getattr(sys, "monitoring", None)
"""Available since Python 3.12."""
_MOST_TIMES = 3
"""Number of starts of a function between two collectives that count as points."""
_WRITES = os.O_WRONLY | os.O_RDWR


class Struck(Exception):
    """The error of the fault `raise`."""


class Point(NamedTuple):
    """The `number`th start of a function after collective `after` of a thread. Both are counted from 1."""

    thread: str
    after: int
    function: str
    number: int
    collective: str = ""
    """Name and caller of the collective."""
    ever: int = 0
    """Number of functions that have started in the thread. If the point of a fault has no function, only this number
    and the thread count."""

    def is_at(self, point: Point) -> bool:
        """Return whether this is the point of a fault."""
        if not point.function:
            return (self.thread, self.ever) == (point.thread, point.ever)
        return self[:4] == point[:4]

    @property
    def description(self) -> str:
        """The text of the point in a table."""
        thread = "" if self.thread == "MainThread" else f", in {self.thread}"
        return f"{self.function} after {self.collective}{thread}" if self.function else f"function {self.ever}{thread}"


@dataclass
class _OfThread:
    after: int = 0
    collective: str = "the start"
    ever: int = 0
    begun: dict[str, int] = field(default_factory=dict)
    """Number of starts of each function since the last collective."""


class Watch:
    """Counter of the collectives of each thread of this process, and of the functions of megappo that start between
    them."""

    def __init__(self, at_point: Callable[[Point], None]) -> None:
        """Initialise the counters. `at_point` is called at every point in its thread, and its errors are raised
        there."""
        self._at_point = at_point
        self._threads: dict[str, _OfThread] = {}
        self._inside = threading.local()
        self._names: dict[CodeType, str] = {}
        self._is_over = False

    def start(self) -> None:
        """Start to count before this process joins a world. The count ends when the process leaves the world."""
        for name in _COLLECTIVES:
            wrapped = self._wrap(name, getattr(distributed_c10d, name))
            setattr(dist, name, wrapped)
            setattr(distributed_c10d, name, wrapped)

    def _wrap(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "is", False) or (name != _FIRST and not self._threads):
                return collective(*args, **kwargs)
            self._inside.__dict__["is"] = True
            self._is_over = self._is_over or name == _LAST
            try:
                return collective(*args, **kwargs)
            finally:
                self._inside.__dict__["is"] = False
                self._passed(name)

        return counted

    def _passed(self, name: str) -> None:
        if name == _FIRST:
            self._listen()
        of_thread = self._threads.setdefault(_thread(), _OfThread())
        of_thread.after, of_thread.begun = of_thread.after + 1, {}
        of_thread.collective = f"{name} of {_caller()}"

    def _listen(self) -> None:
        """Register a callback for starts of functions. Since Python 3.12, functions outside megappo cost nothing;
        before, a run takes twice as long."""
        if _MONITORING is not None:
            tool, event = _MONITORING.PROFILER_ID, _MONITORING.events.PY_START
            _MONITORING.use_tool_id(tool, "faults")
            _MONITORING.register_callback(tool, event, self._begins)
            _MONITORING.set_events(tool, event)
        else:

            def seen(frame: FrameType, event: str, _arg: object) -> None:
                if event == "call":
                    self._begins(frame.f_code)

            threading.setprofile(seen)
            sys.setprofile(seen)

    def _begins(self, code: CodeType, _offset: int = 0) -> object:
        name = self._names.get(code)
        if name is None:
            name = self._names[code] = _name(code)
        if not name:
            return _MONITORING and _MONITORING.DISABLE
        if not (self._is_over or getattr(self._inside, "is", False)):
            self._begun(name)
        return None

    def _begun(self, name: str) -> None:
        of_thread = self._threads.setdefault(thread := _thread(), _OfThread())
        number = of_thread.begun[name] = of_thread.begun.get(name, 0) + 1
        of_thread.ever += 1
        self._inside.__dict__["is"] = True
        try:
            self._at_point(Point(thread, of_thread.after, name, number, of_thread.collective, of_thread.ever))
        finally:
            self._inside.__dict__["is"] = False


def trace(out: Path) -> None:
    """Write the points of this process to a file, one line per point."""
    file = out.open("w", buffering=1)

    def at_point(point: Point) -> None:
        if point.number <= _MOST_TIMES:
            print(json.dumps(point), file=file)

    Watch(at_point).start()


@dataclass(frozen=True)
class Fault:
    """A fault of a rank."""

    kind: str
    rank: int
    point: Point


def strike(fault: Fault, directory: Path, report: Path) -> None:
    """Inject a fault into this process once. The file `report` then contains the time and the newest checkpoint of
    the run directory."""
    struck = threading.Event()

    def write_report() -> None:
        newest = max((marker.step for marker in finished(directory / "checkpoints").values()), default=-1)
        partial = report.with_suffix(".partial")
        partial.write_text(json.dumps({"seconds": time.monotonic(), "newest": newest}))
        partial.rename(report)

    def at_point(point: Point) -> None:
        if point.is_at(fault.point) and not struck.is_set():
            struck.set()
            if fault.kind.startswith("full"):
                _fill(directory, write_report, times=1 if fault.kind == "full once" else _FOREVER)
            else:
                write_report()
                _suffer(fault.kind)

    Watch(at_point).start()


def _suffer(kind: str) -> None:
    if kind == "raise":
        raise Struck(FAULT_MESSAGE)
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        return
    time.sleep(NAP_SECONDS if kind == "nap" else _FOREVER)


def _fill(directory: Path, write_report: Callable[[], None], times: int) -> None:
    """Make writes and new files in the directory fail, permanently or a number of times. `write_report` is called at
    the first failure."""
    left, append = [times], AppendedFile.append
    inside = str(directory) + os.sep

    def refuse(path: object) -> None:
        if isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(inside) and left[0]:
            left[0] -= 1
            if left[0] == times - 1:
                write_report()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def refuse_writes(event: str, arguments: tuple[Any, ...]) -> None:
        is_written = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
        if is_written or event == "os.mkdir":
            refuse(arguments[0])

    def append_in_vain(self: AppendedFile, piece: bytes) -> None:
        refuse(directory / "appended")
        append(self, piece)

    sys.addaudithook(refuse_writes)
    AppendedFile.append = append_in_vain  # type: ignore[method-assign]


def _thread() -> str:
    return re.sub(r"\d+", "N", threading.current_thread().name)


def _name(code: CodeType) -> str:
    """Return `megappo/file.py:function`, or "" for functions outside megappo."""
    path = Path(code.co_filename)
    if code.co_name.startswith("<") or not path.is_relative_to(ROOT / "megappo"):
        return ""
    return f"{path.relative_to(ROOT)}:{code.co_qualname}"


def _caller() -> str:
    """Return the function that calls a collective."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = _name(frame.f_code)
        if name and name.partition(":")[0] not in _PASSED_ON:
            return name
        frame = frame.f_back
    return "nobody"
