"""Starts programs on several processes and hands back what they wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.places import ROOT

WORKERS = Path(__file__).parent / "workers"
STARTS = "megappo.tests.start"
"""The audit event of a program that is started here."""


def environment() -> dict[str, str]:
    """The variables of a nursery."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": ":".join(paths),
    }


_NURSERY = """
from megappo.runtime.heap import collections_put_off
with collections_put_off():
    from tests.support.nursery import main
main()
"""
_nurseries: list[Connection] = []
"""At most one."""


def use(nursery: Connection) -> None:
    """Have programs of this process forked off a nursery that somebody else keeps."""
    _nurseries[:] = [nursery]


def _nursery() -> Connection:
    """To the process that all others are forked from; see nursery.py."""
    if _nurseries:
        return _nurseries[0]
    ours, its = Pipe()
    command = [sys.executable, "-c", _NURSERY, str(its.fileno())]
    subprocess.Popen(command, cwd=ROOT, env=environment(), pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    its.close()
    use(ours)
    return ours


def start(
    program: str | Path,
    *arguments: object,
    processes: int = 0,
    timeout_seconds: float = 300,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a file or a package on so many processes with torchrun's variables, or once without them where it is 0; with
    other variables than the nursery's where they are given."""
    sys.audit(STARTS, str(program))
    nursery, words = _nursery(), list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / name for name in ("stdout", "stderr")]
        given = None if environment is None else dict(environment)
        nursery.send((str(program), words, processes, *map(str, logs), given))
        child = nursery.recv()
        late = not nursery.poll(timeout_seconds)
        if late:
            os.killpg(child, signal.SIGKILL)
        code = nursery.recv()
        said = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    assert not late, f"{program} {words} took longer than {timeout_seconds:g} s: {(said[0] + said[1])[-6000:]}"
    return subprocess.CompletedProcess([str(program), *words], code, *said)


def launch(worker: str, processes: int, *arguments: object, timeout_seconds: float = 300) -> str:
    """Run tests/support/workers/<worker> on so many processes; returns its output, fails with it."""
    done = start(WORKERS / worker, *arguments, processes=processes, timeout_seconds=timeout_seconds)
    output = done.stdout + done.stderr
    lines = [line for line in output.splitlines() if not line.startswith("frame #")]  # of torch's C++
    assert done.returncode == 0, "\n".join(lines)[-6000:]
    return output


def ask(worker: str, processes: int, case: Mapping[str, Any], timeout_seconds: float = 300) -> Any:
    """What a worker finds out about a case. Each case has processes of its own, so that a test runs nothing but what it
    judges: forked off the nursery they start in a third of a second."""
    with tempfile.TemporaryDirectory() as folder:
        told, found = Path(folder) / "case.json", Path(folder) / "found.json"
        told.write_text(json.dumps(case))
        launch(worker, processes, told, found, timeout_seconds=timeout_seconds)
        return json.loads(found.read_text())
