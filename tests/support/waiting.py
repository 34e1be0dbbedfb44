"""Whether a test waits: for a process that it starts, for a server, or for time to pass."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from tests.support.harness import STARTS

HEARD: list[str] = []
"""What has been waited for since it was cleared, by the names of Python's audit events."""
_EVENTS = {"os.fork", "os.posix_spawn", "socket.bind", STARTS}
_QUICK = {"cc", "file", "gcc", "git", "grep", "ld", "ldconfig", "lscpu", "nvidia-smi", "objdump", "uname"}
"""Programs that answer at once."""
_SHORT_SECONDS = 0.02


def listen() -> None:
    """Fill `HEARD` from now on."""
    sys.addaudithook(_hear)
    sleep = time.sleep

    def heard_sleep(seconds: Any, /) -> None:
        if seconds > _SHORT_SECONDS and threading.current_thread() is threading.main_thread():
            HEARD.append("time.sleep")
        sleep(seconds)

    time.sleep = heard_sleep


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        program, words = arguments[:2]
        first = program if program is not None else words if isinstance(words, str | bytes) else words[0]
        is_parsed_only = list(words)[:2] == ["bash", "-n"]
        if os.path.basename(os.fsdecode(first)) not in _QUICK and not is_parsed_only:
            HEARD.append(event)
    elif event in _EVENTS:
        HEARD.append(event)
