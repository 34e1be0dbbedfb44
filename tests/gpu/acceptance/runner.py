"""Run steps in sequence in a worker process, with a time limit per step and in total.

If a step raises, hangs or kills its process, the next step gets a new worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from tests.gpu.acceptance.registry import Place, Step
from tests.gpu.acceptance.table import FAILED, Report, Row, failed, skipped
from tests.support.places import ROOT

_WHOLE = "the step"


class Worker:
    """A process that runs steps and sends their rows."""

    def __init__(self, place: Place, environment: Mapping[str, str], log: Path) -> None:
        ours, its = Pipe()
        self._connection: Connection = ours
        command = [sys.executable, "-m", "tests.gpu.acceptance.worker", str(its.fileno())]
        with log.open("a") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**environment, **_variables(place)}, pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        its.close()
        self._place = place

    def begin(self, step: Step) -> None:
        """Start a step."""
        self._connection.send((step.function, asdict(self._place)))

    def row(self, seconds: float) -> Row | None:
        """Return the next row, or None after the last. Raises TimeoutError after `seconds`, and EOFError if the
        worker is dead."""
        if not self._connection.poll(max(0.0, seconds)):
            raise TimeoutError
        message = self._connection.recv()
        return None if message is None else Row.of(message)

    def end(self) -> None:
        """Kill the worker and all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()


def _variables(place: Place) -> dict[str, str]:
    """Return variables that must be set before torch and Triton are imported."""
    variables = {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if place.device == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    if place.tiny:
        variables |= {"OMP_NUM_THREADS": "1"}
    return variables


def environment(site: Path | None = None) -> dict[str, str]:
    """Return the variables of this process. The packages of the repository and of `site` come first on the import
    path."""
    folders = [str(site)] if site is not None else []
    folders += [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**inherited, "PYTHONPATH": ":".join(filter(None, folders))}


def run_steps(
    steps: Sequence[Step], place: Place, report: Report, *, seconds: float, variables: Mapping[str, str], log: Path
) -> None:
    """Add the rows of all steps to the report. `seconds` is the time limit of all steps together."""
    end, worker = time.monotonic() + seconds, None
    try:
        for step in steps:
            left = end - time.monotonic()
            needed = step.seconds if not place.tiny else 0.0
            if left <= needed:
                reason = f"needs {step.seconds:g} s, of {seconds:g} s for this part {max(left, 0):.0f} are left"
                report.add(step.name, skipped(_WHOLE, reason))
                continue
            is_alone = step.is_alone and not place.tiny
            if is_alone and worker is not None:
                worker.end()
                worker = None
            worker = worker if worker is not None else Worker(place, variables, log)
            most = left if place.tiny else min(step.most_seconds, left)
            if not _run(worker, step, report, left, most) or is_alone:
                worker.end()
                worker = None
    finally:
        if worker is not None:
            worker.end()


def _run(worker: Worker, step: Step, report: Report, left: float, most: float) -> bool:
    """Run one step within `most` seconds and return whether the worker can continue."""
    started = time.monotonic()
    try:
        worker.begin(step)
        rows = []
        while (row := worker.row(started + most - time.monotonic())) is not None:
            rows.append(row)
            report.add(step.name, row)
    except TimeoutError:
        if most == left:
            report.add(step.name, skipped("the rest", f"the time of this part ended {most:.0f} s after its start"))
        else:
            report.add(step.name, failed(_WHOLE, f"it did not end within {most:.0f} s"))
        return False
    except (EOFError, ConnectionError):
        report.add(step.name, failed(_WHOLE, "its process died; see the log"))
        return False
    report.seconds[step.name] = round(time.monotonic() - started, 1)
    return not any(row.verdict == FAILED and row.what == _WHOLE for row in rows)
