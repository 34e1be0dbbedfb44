"""Detection of tests that wait for a process, for a server, or for time to pass."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from tests.support.harness import STARTS

WAITS: list[str] = []
"""Names of audit events of Python that indicate a wait, since the list was cleared."""
_EVENTS = {"os.fork", "os.posix_spawn", "socket.bind", STARTS}
_QUICK = {"cc", "file", "gcc", "git", "grep", "ld", "ldconfig", "lscpu", "nvidia-smi", "objdump", "uname"}
"""Programs that end at once."""
_SHORT_SECONDS = 0.02


def listen() -> None:
    """Start to fill `WAITS`."""
    sys.addaudithook(_record)
    sleep = time.sleep

    def recording_sleep(seconds: Any, /) -> None:
        if seconds > _SHORT_SECONDS and threading.current_thread() is threading.main_thread():
            WAITS.append("time.sleep")
        sleep(seconds)

    time.sleep = recording_sleep


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        program, command = arguments[:2]
        first = program if program is not None else command if isinstance(command, str | bytes) else command[0]
        is_parsed_only = list(command)[:2] == ["bash", "-n"]
        if os.path.basename(os.fsdecode(first)) not in _QUICK and not is_parsed_only:
            WAITS.append(event)
    elif event in _EVENTS:
        WAITS.append(event)
