"""Run test files in parallel processes, report progress, and rerun failed tests that are marked `waits`.

Usage: python -m tests.house.suite [--quick | --all | --exhaustive | --light] [--waits] [--busy N] [--sides N]
           [--measure] [--dearest N] [--no-types] [FILE...]

Each test file runs in a separate process, which is forked after the common modules are imported. The slowest files
start first, by the times in seconds.json, which `--measure` updates for the files that are run. `--sides` limits the
number of parallel files. One file that mostly waits runs in addition to these files. mypy takes one slot until it
finishes. When all files are done, each failed test that is marked `waits` is run again. If the test then passes, it is
listed as unsteady. The exit code is 1 if another test fails, if more than three tests are unsteady, or if mypy fails.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from megappo.runtime.device import share_cores
from megappo.runtime.memory.allocator import with_room_for_frames
from tests.house.telling import EventWriter, Outcome, cpu_seconds
from tests.support import (
    harness,
    nursery,  # imports the common modules before the first fork
)
from tests.support.places import ROOT
from tests.support.quick import has_exhaustive

SECONDS = ROOT / "tests" / "house" / "seconds.json"
"""Measured seconds, CPU seconds and number of tests of each file."""
EXHAUSTIVE = ROOT / "tests" / "house" / "exhaustive.json"
"""Measurements of the exhaustive tests of each file, with the commit and the date of the last run that passed."""
MOST_UNSTEADY = 3
_SHOWN_EVERY_SECONDS = 20.0
_SHOWN_LINES = 12
_TOGETHER = ("tests/slurm",)
"""Folders whose files share a slow fixture and therefore run in one process."""
_SHARE_OF_WAITERS = 0.3
"""Maximum ratio of CPU seconds to seconds for a file that mostly waits."""
_UNKNOWN = {"cpu_seconds": 5.0, "tests": 1}
_FAILED, _BROKEN, _NO_TESTS = (1, 2), 3, 5
_ENDINGS = (0, *_FAILED, _NO_TESTS)
"""Exit codes of pytest after a complete run. Code 2 means that a file cannot be read, 5 that no test was selected."""
_SET_CHILD_SUBREAPER = 36
_LARGE_PAGE_BYTES, _MADV_COLLAPSE = 2 * 2**20, 25


@dataclass
class Part:
    """Test files that run in one process."""

    files: list[str]
    seconds: float
    """Expected minimum duration, from the last measurement, in which other files ran in parallel."""
    tests: int
    """Number of tests: the measured number first, then the number that pytest collects."""
    log: Path
    mostly_waits: bool = False
    process: int = 0
    events: Generator[str, None, None] | None = None
    running: str = ""
    """ID of the test that started last."""
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def name(self) -> str:
        return os.path.commonpath(self.files)


def parts_of(files: Sequence[str], folder: Path) -> list[Part]:
    """Return the parts for these files, the slowest first. The time of a part counts computation and waiting."""
    measured: dict[str, Any] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    groups: dict[str, list[str]] = {}
    for file in files:
        group_name = next((place for place in _TOGETHER if file.startswith(f"{place}/")), file)
        groups.setdefault(group_name, []).append(file)
    parts = []
    for number, group in enumerate(groups.values()):
        known = [measured.get(file, _UNKNOWN) for file in group]
        seconds = sum(max(of_file["cpu_seconds"], of_file.get("seconds", 0.0)) for of_file in known)
        tests, computes = (sum(of_file[name] for of_file in known) for name in ("tests", "cpu_seconds"))
        parts.append(Part(group, seconds, tests, folder / str(number), computes < _SHARE_OF_WAITERS * seconds))
    return sorted(parts, key=lambda part: -part.seconds)


def next_part(todo: Sequence[Part], running: Sequence[Part], sides: int) -> Part | None:
    """Return the part to start now. One part that mostly waits runs in addition to `sides` others, and goes first."""
    one_waits = any(part.mostly_waits for part in running)
    waiting, computing = ([part for part in todo if part.mostly_waits == waits] for waits in (True, False))
    if waiting and not one_waits:
        return waiting[0]
    if todo and len(running) - one_waits < sides:
        return (computing or waiting)[0]
    return None


def start(part: Part, options: Sequence[str]) -> None:
    """Fork a process that runs a part."""
    events = part.log.with_suffix(".events")
    events.touch()
    sys.stdout.flush()
    sys.stderr.flush()
    part.process = os.fork()
    if part.process == 0:
        code = _BROKEN
        try:
            code = run_part(part, options, events)
        finally:
            os._exit(code)
    part.events = _lines(events)


def run_part(part: Part, options: Sequence[str], events: Path) -> int:
    """Run a part and a nursery in child processes, and return the exit code of pytest. This process is the subreaper of
    its descendants, so that their CPU time is counted."""
    os.setsid()
    # Restore the default handlers, as in a separate start of pytest. nohup ignores SIGHUP.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    output = os.open(part.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ours, its = Pipe()
    nursing = os.fork()
    if nursing == 0:
        ours.close()
        os.environ.update(harness.environment())
        warnings.simplefilter("ignore")
        nursery.serve(its)
        os._exit(0)
    its.close()
    tests = os.fork()
    if tests == 0:
        # Processes that tests spawn import the main module. An empty module avoids the imports of this file.
        sys.modules["__main__"] = ModuleType("__main__")
        harness.use(ours)
        code = _BROKEN
        try:
            plugins = [EventWriter(events, os.getppid())]
            code = int(with_room_for_frames(lambda: pytest.main([*options, *part.files], plugins=plugins)))
        finally:
            os._exit(code)
    ours.close()
    while True:
        ended, status = os.wait()
        if ended == tests:
            code = os.waitstatus_to_exitcode(status)
            with suppress(ChildProcessError):  # the nursery has already ended
                os.waitpid(nursing, 0)  # this adds the CPU time of its children to this process
            return code if code >= 0 else 128 - code  # the convention of shells for signals


def end_with_descendants(process: int) -> None:
    """Kill a child process and all its descendants, including servers and SLURM daemons in other sessions."""
    root = psutil.Process(process)
    root.suspend()  # a suspended process starts no more children
    while running := [one for one in root.children(recursive=True) if _runs(one)]:
        for one in running:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        time.sleep(0.05)
    root.kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _lines(path: Path) -> Generator[str, None, None]:
    """Yield the complete lines of a growing file. Yield an empty string if no complete line is available."""
    with path.open() as file:
        buffer = ""
        while True:
            buffer += file.readline()
            if buffer.endswith("\n"):
                yield buffer
                buffer = ""
            else:
                yield ""


class Suite:
    """Scheduler of the parts, with the results so far."""

    def __init__(self, parts: list[Part], sides: int, options: Sequence[str]) -> None:
        self._todo, self._sides, self._options = list(parts), sides, options
        self._parts = parts
        self._started = self._shown = time.monotonic()
        self.failed: list[Outcome] = []
        self.counts: Counter[str] = Counter()

    def run(self, background: subprocess.Popen[str] | None) -> None:
        """Run all parts. While the `background` process runs, use one slot less."""
        running: list[Part] = []
        try:
            while self._todo or running:
                busy = background is not None and background.poll() is None
                while part := next_part(self._todo, running, max(1, self._sides - busy)):
                    self._todo.remove(part)
                    start(part, self._options)
                    running.append(part)
                running = [part for part in running if self._read_events(part)]
                self._show(running)
                time.sleep(0.1)
        finally:
            for part in running:
                end_with_descendants(part.process)

    def _read_events(self, part: Part) -> bool:
        """Read the events of a part. Return whether the part is still running."""
        done, status = os.waitpid(part.process, os.WNOHANG)
        assert part.events is not None
        while line := next(part.events):
            note = json.loads(line)
            if "collected" in note:
                part.tests = note["collected"]
            elif "begins" in note:
                part.running = note["begins"]
            else:
                self._note(part, Outcome(**note))
        if not done:
            return True
        code = os.waitstatus_to_exitcode(status)
        part.events.close()  # otherwise processes that are forked later inherit the open file
        part.tests = len(part.outcomes)
        has_failure = any(outcome.ending == "failed" for outcome in part.outcomes)
        if code not in _ENDINGS or (code in _FAILED and not has_failure):
            message = f"pytest ended with code {code}: {part.log.read_text(errors='replace')[-3000:]}"
            self._note(part, Outcome(part.running or part.name, "failed", False, False, message, 0.0))
        return False

    def _note(self, part: Part, outcome: Outcome) -> None:
        part.outcomes.append(outcome)
        part.running = ""
        self.counts[outcome.ending] += 1
        if outcome.ending == "failed":
            self.failed.append(outcome)
            last = outcome.output.splitlines()[-_SHOWN_LINES:]
            print("\n".join([f"FAILED {outcome.test}", *(f"    {line}" for line in last)]), flush=True)

    def _show(self, running: Sequence[Part]) -> None:
        if time.monotonic() < self._shown + _SHOWN_EVERY_SECONDS:
            return
        self._shown = time.monotonic()
        minutes, seconds = divmod(round(self._shown - self._started), 60)
        sides = [f"{part.name.removeprefix('tests/')} {len(part.outcomes)}/{part.tests}" for part in running]
        of_all = f"{sum(self.counts.values())} of {sum(part.tests for part in self._parts)}"
        failed = f", {self.counts['failed']} failed" if self.counts["failed"] else ""
        print(f"[{minutes:2}:{seconds:02}] {of_all}{failed}; now {', '.join(sides)}", flush=True)

    def rerun_failed(self, folder: Path) -> list[Outcome]:
        """Run each failed test that is marked `waits` again, alone. Return the tests that passed."""
        unsteady: list[Outcome] = []
        for number, outcome in enumerate([outcome for outcome in self.failed if outcome.waits]):
            print(f"rerun alone: {outcome.test}", flush=True)
            (file,) = {f for part in self._parts if outcome in part.outcomes for f in part.files if is_from(outcome, f)}
            test = f"{file}::{outcome.test.partition('::')[2]}"
            alone = Part([test], 0.0, 1, folder / f"again-{number}")
            trial = Suite([alone], 1, self._options)
            trial.run(None)
            if trial.counts["passed"] and not trial.counts["failed"]:
                unsteady.append(outcome)
                self.failed.remove(outcome)
                self.counts["failed"] -= 1
                self.counts["passed"] += 1
        return unsteady


def use_large_pages() -> None:
    """Move the memory of this process to large pages. A fork then copies fewer page table entries, and takes 11 ms
    instead of 37 ms. The call has no effect on kernels before Linux 6.1."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, _, *name = line.split()
        if rights == "rw-p" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in span.split("-"))
            first, last = -(-begin // _LARGE_PAGE_BYTES), end // _LARGE_PAGE_BYTES
            if last > first:
                madvise(first * _LARGE_PAGE_BYTES, (last - first) * _LARGE_PAGE_BYTES, _MADV_COLLAPSE)


@contextmanager
def busy_loops(count: int) -> Iterator[list[int]]:
    """Run processes that use all available time of a core, until the context ends. Yield their process IDs."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def files_of(name: str) -> list[str]:
    """Return a test file, or the test files of a folder."""
    if not Path(ROOT, name).is_dir():
        return [name]
    return [os.path.relpath(path, ROOT) for path in sorted(Path(ROOT, name).rglob("test_*.py"))]


def is_from(outcome: Outcome, file: str) -> bool:
    """Return whether a test belongs to a file. pytest reports paths relative to a root directory of its choice."""
    return Path(file).as_posix().endswith(outcome.test.partition("::")[0])


def print_results(suite: Suite, unsteady: Sequence[Outcome], parts: Sequence[Part]) -> int:
    """Print the results and return the exit code."""
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    for reason, count in Counter(o.output.partition("\n")[0] for o in outcomes if o.ending == "skipped").items():
        print(f"skipped {count}: {reason}")
    for outcome in suite.failed:
        print(f"\n{'=' * 20} {outcome.test}\n{outcome.output}")
    if unsteady:
        print(f"\nunsteady: {len(unsteady)}, at most {MOST_UNSTEADY}")
    for outcome in unsteady:
        print(f"{'-' * 20} {outcome.test}\n{outcome.output}")
    code = int(bool(suite.failed) or len(unsteady) > MOST_UNSTEADY)
    counts = suite.counts
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)
    return code


def print_dearest(parts: Sequence[Part], count: int) -> None:
    """Print the tests with the highest CPU time, including the fixtures that a test was the first to use."""
    outcomes = sorted((outcome for part in parts for outcome in part.outcomes), key=lambda x: -x.cpu_seconds)
    for outcome in outcomes[:count]:
        print(f"{outcome.cpu_seconds:6.1f} CPU s {outcome.seconds:6.1f} s  {outcome.test}")


def by_file(parts: Sequence[Part], *, exhaustive: bool) -> dict[str, dict[str, Any]]:
    """Return seconds, CPU seconds and the number of tests of each file, for either exhaustive or other tests."""
    results: dict[str, dict[str, Any]] = {}
    nothing = {"cpu_seconds": 0.0, "seconds": 0.0, "tests": 0}
    for part in parts:
        for outcome in part.outcomes:
            if outcome.exhaustive == exhaustive:
                of_file = results.setdefault(outcome.test.partition("::")[0], {**nothing})
                of_file["cpu_seconds"] = round(of_file["cpu_seconds"] + outcome.cpu_seconds, 1)
                of_file["seconds"] = round(of_file["seconds"] + outcome.seconds, 1)
                of_file["tests"] += 1
    return dict(sorted(results.items()))


def with_new_results(known: dict[str, Any], new_results: dict[str, Any]) -> dict[str, Any]:
    """Return the known results of all files, sorted, with the new results of some files."""
    return dict(sorted((known | new_results).items()))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def note_exhaustive(parts: Sequence[Part]) -> None:
    """Record the commit and the date for each file whose exhaustive tests all passed. Entries of other files remain if
    the files still contain exhaustive tests."""
    commit = _git("rev-parse", "--short", "HEAD")
    if _git("status", "--porcelain", "--", ".", ":!tests/house/exhaustive.json"):  # written by an earlier run
        commit += "-dirty"
    known = json.loads(EXHAUSTIVE.read_text()) if EXHAUSTIVE.exists() else {}
    known = {file: known[file] for file in known if Path(ROOT, file).exists() and has_exhaustive(Path(ROOT, file))}
    outcomes = [outcome for part in parts for outcome in part.outcomes if outcome.exhaustive]
    unproven = {outcome.test.partition("::")[0] for outcome in outcomes if outcome.ending != "passed"}
    proof = {"commit": commit, "date": str(datetime.now(UTC).date())}
    results = {file: of | proof for file, of in by_file(parts, exhaustive=True).items() if file not in unproven}
    EXHAUSTIVE.write_text(json.dumps(with_new_results(known, results), indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="test file or folder")
    parser.add_argument("--quick", action="store_true", help="only quick tests and cases; see tests/README.md")
    parser.add_argument("--all", action="store_true", help="include exhaustive tests; see tests/README.md")
    parser.add_argument("--exhaustive", action="store_true", help="only exhaustive tests; see tests/README.md")
    parser.add_argument("--light", action="store_true", help="only tests of package versions; see tests/README.md")
    parser.add_argument("--waits", action="store_true", help="only tests that are marked waits; see tests/README.md")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="run N busy loops during the tests")
    parser.add_argument("--sides", type=int, default=(os.cpu_count() or 1) + 1, help="number of parallel files")
    parser.add_argument("--types", action=argparse.BooleanOptionalAction, default=True, help="run mypy, too")
    parser.add_argument("--measure", action="store_true", help="update seconds.json")
    parser.add_argument("--dearest", type=int, default=0, metavar="N", help="print the N slowest tests by CPU time")
    arguments = parser.parse_args()
    share_cores()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # run the cleanup of running parts
    files = [file for name in arguments.files or ["tests"] for file in files_of(name)]
    for plugin in ("_hypothesis_pytestplugin", "hypothesis", "pytest_timeout"):
        importlib.import_module(plugin)  # all pytest processes use these plugins
    gc.collect()
    gc.freeze()  # garbage collection in forked processes then does not copy these objects
    use_large_pages()
    if arguments.light:
        files = [file for file in files if "mark.versions" in Path(ROOT, file).read_text()]
    if arguments.waits:
        files = [file for file in files if "mark.waits" in Path(ROOT, file).read_text()]
    options = [f"--{name}" for name in ("quick", "all", "light") if getattr(arguments, name)]
    if arguments.exhaustive:
        files = [file for file in files if has_exhaustive(Path(ROOT, file))]
        options.append("--all")
    if marks := [mark for mark in ("exhaustive", "waits") if getattr(arguments, mark)]:
        options += ["-m", " and ".join(marks)]
    command = [sys.executable, "-m", "mypy"] if arguments.types else ["true"]
    types = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory(prefix="megappo-tests-") as scratch, busy_loops(arguments.busy) as loops:
        parts = parts_of(files, Path(scratch))
        suite = Suite(parts, arguments.sides, options)
        suite.run(types)
        unsteady = suite.rerun_failed(Path(scratch))
        type_errors, _ = types.communicate()
        print(type_errors, end="")
        code = print_results(suite, unsteady, parts)
        used = cpu_seconds(os.getpid()) - sum(map(cpu_seconds, loops))
    print_dearest(parts, arguments.dearest)
    if arguments.measure:
        others = json.loads(SECONDS.read_text()) if arguments.files else {}
        known = {file: others[file] for file in others if Path(ROOT, file).exists()}
        SECONDS.write_text(json.dumps(with_new_results(known, by_file(parts, exhaustive=False)), indent=1) + "\n")
    if arguments.exhaustive or arguments.all:
        note_exhaustive(parts)
    print(f"{used / 60:.1f} core-minutes")
    return code or types.returncode


if __name__ == "__main__":
    sys.exit(main())
