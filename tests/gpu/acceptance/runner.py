"""Runs steps one after another in a worker process, each within its deadline and all within a budget.

A step that raises, hangs or takes the process down with it ends alone: the next one gets a new worker.
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
        with log.open("a") as said:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env={**environment, **_variables(place)}, pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip
        its.close()
        self._place = place

    def begin(self, step: Step) -> None:
        """Have it run a step."""
        self._connection.send((step.function, asdict(self._place)))

    def row(self, seconds: float) -> Row | None:
        """The next row, None after the last. Raises TimeoutError after so many seconds, EOFError where it is dead."""
        if not self._connection.poll(max(0.0, seconds)):
            raise TimeoutError
        found = self._connection.recv()
        return None if found is None else Row.of(found)

    def end(self) -> None:
        """Kill it with what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()


def _variables(place: Place) -> dict[str, str]:
    """What must be set before torch and Triton are imported."""
    found = {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if place.device == "cpu":
        found |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    if place.tiny:
        found |= {"OMP_NUM_THREADS": "1"}
    return found


def environment(site: Path | None = None) -> dict[str, str]:
    """This process's, with the repository's packages and those of `site` first."""
    folders = [str(site)] if site is not None else []
    folders += [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**inherited, "PYTHONPATH": ":".join(filter(None, folders))}


def run_steps(
    steps: Sequence[Step], place: Place, report: Report, *, seconds: float, given: Mapping[str, str], log: Path
) -> None:
    """Add the rows of all steps to the report; `seconds` for all of them together."""
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
            worker = worker if worker is not None else Worker(place, given, log)
            most = left if place.tiny else min(step.most_seconds, left)
            if not _run(worker, step, report, left, most) or is_alone:
                worker.end()
                worker = None
    finally:
        if worker is not None:
            worker.end()


def _run(worker: Worker, step: Step, report: Report, left: float, most: float) -> bool:
    """The rows of one step within `most` seconds; whether the worker can go on."""
    started = time.monotonic()
    try:
        worker.begin(step)
        rows = []
        while (row := worker.row(started + most - time.monotonic())) is not None:
            rows.append(row)
            report.add(step.name, row)
    except TimeoutError:
        if most == left:
            report.add(step.name, skipped("the rest", f"the time of this part ended {most:.0f} s after its begin"))
        else:
            report.add(step.name, failed(_WHOLE, f"it did not end within {most:.0f} s"))
        return False
    except (EOFError, ConnectionError):
        report.add(step.name, failed(_WHOLE, "its process died; the log has its last words"))
        return False
    report.seconds[step.name] = round(time.monotonic() - started, 1)
    return not any(row.verdict == FAILED and row.what == _WHOLE for row in rows)
