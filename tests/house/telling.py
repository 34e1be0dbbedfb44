"""pytest plugin that writes the events of a test run to a file, for `suite.py`. Each line is one JSON object.

The first line is `{"collected": 12}`. Each test then writes `{"begins": ID}` and its `Outcome`.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Outcome:
    """Result of a test."""

    test: str
    """ID in pytest."""
    ending: str
    """"passed", "failed" or "skipped"."""
    waits: bool
    exhaustive: bool
    """Whether the test is marked `exhaustive`."""
    output: str
    """Reason of a skipped test, or the report of pytest about a failure."""
    cpu_seconds: float
    """CPU time of all processes of the test file during the test."""
    seconds: float = 0.0
    """Duration of the test."""


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process, its descendants, and ended children that were waited for."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):  # this runs after each test for all processes, and therefore avoids psutil objects
        if name.isdigit():
            try:
                opened = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            except OSError:  # the process has ended
                continue
            try:
                stat = os.read(opened, 4096)
            except OSError:
                continue
            finally:
                os.close(opened)
            fields = stat[stat.rindex(b")") + 2 :].split(maxsplit=15)
            used[int(name)] = sum(map(int, fields[11:15]))
            children[int(fields[1])].append(int(name))
    ours = [root]
    for process in ours:
        ours += children[process]
    return sum(used.get(process, 0) for process in ours) / os.sysconf("SC_CLK_TCK")


class EventWriter:
    """Plugin of pytest."""

    def __init__(self, path: Path, root: int) -> None:
        """Count the CPU time of the process `root` and its descendants as the CPU time of the tests."""
        self._root = root
        self._file = path.open("a", buffering=1)
        self._reports: list[pytest.TestReport] = []
        self._cpu_seconds = self._begun = 0.0

    def _write_event(self, event: dict[str, object]) -> None:
        self._file.write(json.dumps(event) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write_event({"collected": len(session.items)})
        self._cpu_seconds = cpu_seconds(self._root)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write_event(asdict(Outcome(report.nodeid, "failed", False, False, report.longreprtext, 0.0)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports, self._begun = [], time.monotonic()
        self._write_event({"begins": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        endings = {report.outcome for report in self._reports}
        ending = next((e for e in ("failed", "skipped") if e in endings), "passed")
        text = "\n".join(_report_text(report) for report in self._reports if report.outcome == ending != "passed")
        waits, exhaustive = (any(mark in r.keywords for r in self._reports) for mark in ("waits", "exhaustive"))
        before, self._cpu_seconds = self._cpu_seconds, cpu_seconds(self._root)
        took = self._cpu_seconds - before, time.monotonic() - self._begun
        self._write_event(asdict(Outcome(nodeid, ending, waits, exhaustive, text, *took)))


def _report_text(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    sections = [f"--- {name}\n{text}" for name, text in report.sections if text.strip()]
    return "\n".join([report.longreprtext, *sections])
