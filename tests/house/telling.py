"""A plugin of pytest that tells `suite.py` of each test, by one line of JSON in a file.

`{"collected": 12}` comes first; a test is `{"begins": ID}` and then its `Outcome`.
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
    """What became of a test."""

    test: str
    """pytest's ID."""
    ending: str
    """"passed", "failed" or "skipped"."""
    waits: bool
    exhaustive: bool
    """Whether it is marked so."""
    said: str
    """Why it was skipped, or what pytest shows of a failure."""
    cpu_seconds: float
    """Of all processes that belong to its file, in the meantime."""
    seconds: float = 0.0
    """How long it took."""


def cpu_seconds(root: int) -> float:
    """Of a process and those that descend from it, also of those that have ended and were waited for."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):  # of all processes, after each test: without objects for each
        if name.isdigit():
            try:
                opened = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            except OSError:  # it has ended
                continue
            try:
                stat = os.read(opened, 4096)
            except OSError:
                continue
            finally:
                os.close(opened)
            words = stat[stat.rindex(b")") + 2 :].split(maxsplit=15)
            used[int(name)] = sum(map(int, words[11:15]))
            children[int(words[1])].append(int(name))
    ours = [root]
    for process in ours:
        ours += children[process]
    return sum(used.get(process, 0) for process in ours) / os.sysconf("SC_CLK_TCK")


class Telling:
    """The plugin."""

    def __init__(self, told: Path, root: int) -> None:
        """`root`: the process whose CPU time, with that of its descendants, is the tests'."""
        self._root = root
        self._told = told.open("a", buffering=1)
        self._reports: list[pytest.TestReport] = []
        self._cpu_seconds = self._begun = 0.0

    def _tell(self, what: dict[str, object]) -> None:
        self._told.write(json.dumps(what) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tell({"collected": len(session.items)})
        self._cpu_seconds = cpu_seconds(self._root)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(asdict(Outcome(report.nodeid, "failed", False, False, report.longreprtext, 0.0)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports, self._begun = [], time.monotonic()
        self._tell({"begins": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        endings = {report.outcome for report in self._reports}
        ending = next((e for e in ("failed", "skipped") if e in endings), "passed")
        said = "\n".join(_words(report) for report in self._reports if report.outcome == ending != "passed")
        waits, exhaustive = (any(mark in r.keywords for r in self._reports) for mark in ("waits", "exhaustive"))
        before, self._cpu_seconds = self._cpu_seconds, cpu_seconds(self._root)
        took = self._cpu_seconds - before, time.monotonic() - self._begun
        self._tell(asdict(Outcome(nodeid, ending, waits, exhaustive, said, *took)))


def _words(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    sections = [f"--- {name}\n{text}" for name, text in report.sections if text.strip()]
    return "\n".join([report.longreprtext, *sections])
