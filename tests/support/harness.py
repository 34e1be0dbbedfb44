"""Starts of programs on several processes."""

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
"""The audit event of a program start."""


def environment() -> dict[str, str]:
    """Return the environment variables of a nursery."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": ":".join(paths),
    }


_NURSERY = """
from megappo.runtime.memory.allocator import collections_put_off
with collections_put_off():
    from tests.support.nursery import main
main()
"""
_nurseries: list[Connection] = []
"""At most one connection."""


def use(nursery: Connection) -> None:
    """Use the nursery of another process for the programs of this process."""
    _nurseries[:] = [nursery]


def _nursery() -> Connection:
    """Return the connection to the nursery, which forks all programs; see nursery.py."""
    if _nurseries:
        return _nurseries[0]
    ours, its = Pipe()
    command = [sys.executable, "-c", _NURSERY, str(its.fileno())]
    subprocess.Popen(command, cwd=ROOT, env=environment(), pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    its.close()
    use(ours)
    return ours


def write_program(path: Path, text: str) -> None:
    """Write an executable file, and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def start(
    program: str | Path, *arguments: object, processes: int = 0, timeout_seconds: float = 300,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a file or a package on `processes` processes with the variables of torchrun, or once without these
    variables if `processes` is 0. `environment` replaces the variables of the nursery."""
    sys.audit(STARTS, str(program))
    nursery, command_arguments = _nursery(), list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / name for name in ("stdout", "stderr")]
        variables = None if environment is None else dict(environment)
        nursery.send((str(program), command_arguments, processes, *map(str, logs), variables))
        child = nursery.recv()
        late = not nursery.poll(timeout_seconds)
        if late:
            os.killpg(child, signal.SIGKILL)
        code = nursery.recv()
        outputs = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    assert not late, (
        f"{program} {command_arguments} took longer than {timeout_seconds:g} s: {(outputs[0] + outputs[1])[-6000:]}"
    )
    return subprocess.CompletedProcess([str(program), *command_arguments], code, *outputs)


def succeed(program: str | Path, *arguments: object, **options: Any) -> str:
    """Run a program like `start`, check that it succeeds, and return its standard output."""
    done = start(program, *arguments, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def launch(worker: str, processes: int, *arguments: object, timeout_seconds: float = 300) -> str:
    """Run tests/support/workers/<worker> on `processes` processes and return its output. Raises AssertionError with
    the output if the worker fails."""
    done = start(WORKERS / worker, *arguments, processes=processes, timeout_seconds=timeout_seconds)
    output = done.stdout + done.stderr
    lines = [
        line for line in output.splitlines() if not line.startswith("frame #")
    ]  # stack frames of C++ code in torch
    assert done.returncode == 0, "\n".join(lines)[-6000:]
    return output


def run_worker(worker: str, processes: int, case: Mapping[str, Any], timeout_seconds: float = 300) -> Any:
    """Return the result of a worker for a case. Each case has separate processes, so a test runs only the code under
    test. A fork of the nursery starts in a third of a second."""
    with tempfile.TemporaryDirectory() as folder:
        case_file, result_file = Path(folder) / "case.json", Path(folder) / "found.json"
        case_file.write_text(json.dumps(case))
        launch(worker, processes, case_file, result_file, timeout_seconds=timeout_seconds)
        return json.loads(result_file.read_text())
