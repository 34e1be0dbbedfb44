"""Runs files of tests on a few sides at a time, shows what they have done, and judges what is unsteady.

Usage: python -m tests.house.suite [--quick | --all | --exhaustive | --light] [--waits] [--busy N] [--sides N]
           [--measure] [--dearest N] [--no-types] [FILE...]

`bash tests/run.sh` is this in an environment that it builds.

Each file has a process of its own, forked off this one when it has imported what most of them import. Those that take
longest begin, computing or waiting, by seconds.json, which `--measure` writes anew, or what it says of the files behind
it; one that mostly waits runs beside all sides. mypy has a side until it is through. Tests that are marked `waits` and
fail are run once more, each by itself, when all others are through: those that pass then are listed as unsteady. Exit
code 1 where any other test fails, where more than three are unsteady, or where mypy does.
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
from megappo.runtime.heap import with_room_for_frames
from tests.house.telling import Outcome, Telling, cpu_seconds
from tests.support import (
    harness,
    nursery,  # which has imported what most files import before anything is forked
)
from tests.support.places import ROOT
from tests.support.quick import has_exhaustive

SECONDS = ROOT / "tests" / "house" / "seconds.json"
"""Seconds, CPU seconds and number of tests of each file, as they were measured."""
EXHAUSTIVE = ROOT / "tests" / "house" / "exhaustive.json"
"""Of each file what `--all` or `--exhaustive` ran of it that is exhaustive, and when all of that passed last."""
MOST_UNSTEADY = 3
_SHOWN_EVERY_SECONDS = 20.0
_SHOWN_LINES = 12
_TOGETHER = ("tests/slurm",)
"""Folders whose files share a fixture that takes long."""
_SHARE_OF_WAITERS = 0.3
"""CPU seconds in a second of a file that mostly waits, at most."""
_UNKNOWN = {"cpu_seconds": 5.0, "tests": 1}
_FAILED, _BROKEN, _NO_TESTS = (1, 2), 3, 5
_ENDINGS = (0, *_FAILED, _NO_TESTS)
"""Exit codes of pytest where it has not broken off: 2 where a file cannot be read, 5 where nothing was chosen."""
_SET_CHILD_SUBREAPER = 36
"""An option of prctl(2)."""
_LARGE_PAGE_BYTES, _MADV_COLLAPSE = 2 * 2**20, 25
"""Of madvise(2)."""


@dataclass
class Part:
    """Files that one process runs."""

    files: list[str]
    seconds: float
    """That it takes at least, by the last measurement, in which others ran beside it."""
    tests: int
    """Of them that were there then; as soon as it is known, those that there are."""
    log: Path
    mostly_waits: bool = False
    process: int = 0
    told: Generator[str, None, None] | None = None
    running: str = ""
    """The test that has begun last."""
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def name(self) -> str:
        return os.path.commonpath(self.files)


def parts_of(files: Sequence[str], folder: Path) -> list[Part]:
    """Those that take longest first: whether they compute or wait, cores that others leave are theirs."""
    measured: dict[str, Any] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    groups: dict[str, list[str]] = {}
    for file in files:
        together = next((place for place in _TOGETHER if file.startswith(f"{place}/")), file)
        groups.setdefault(together, []).append(file)
    parts = []
    for number, group in enumerate(groups.values()):
        known = [measured.get(file, _UNKNOWN) for file in group]
        seconds = sum(max(of_file["cpu_seconds"], of_file.get("seconds", 0.0)) for of_file in known)
        tests, computes = (sum(of_file[name] for of_file in known) for name in ("tests", "cpu_seconds"))
        parts.append(Part(group, seconds, tests, folder / str(number), computes < _SHARE_OF_WAITERS * seconds))
    return sorted(parts, key=lambda part: -part.seconds)


def next_part(todo: Sequence[Part], running: Sequence[Part], sides: int) -> Part | None:
    """The part to begin now. Of those that mostly wait one runs beside all sides, others when nothing else is left."""
    one_waits = any(part.mostly_waits for part in running)
    waiting, computing = ([part for part in todo if part.mostly_waits == waits] for waits in (True, False))
    if waiting and not one_waits:
        return waiting[0]
    if todo and len(running) - one_waits < sides:
        return (computing or waiting)[0]
    return None


def start(part: Part, options: Sequence[str]) -> None:
    """Fork a process that runs the part."""
    told = part.log.with_suffix(".told")
    told.touch()
    sys.stdout.flush()
    sys.stderr.flush()
    part.process = os.fork()
    if part.process == 0:
        code = _BROKEN
        try:
            code = keep(part, options, told)
        finally:
            os._exit(code)
    part.told = _lines(told)


def keep(part: Part, options: Sequence[str], told: Path) -> int:
    """Run the part beside a nursery; pytest's exit code. This process adopts descendants whose parents have ended, so
    that the CPU time of all of them is counted."""
    os.setsid()
    # Tests and their children handle signals as if pytest was started alone. nohup ignores SIGHUP.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    said = os.open(part.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
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
        # Processes that tests spawn import the main module: a bare one, in place of this with all that it imports.
        sys.modules["__main__"] = ModuleType("__main__")
        harness.use(ours)
        code = _BROKEN
        try:
            plugins = [Telling(told, os.getppid())]
            code = int(with_room_for_frames(lambda: pytest.main([*options, *part.files], plugins=plugins)))
        finally:
            os._exit(code)
    ours.close()
    while True:
        ended, status = os.wait()
        if ended == tests:
            code = os.waitstatus_to_exitcode(status)
            with suppress(ChildProcessError):  # it has ended before
                os.waitpid(nursing, 0)  # as nobody asks any more; its children's CPU time is this process's then
            return code if code >= 0 else 128 - code  # of a signal, as shells have it


def end_with_descendants(process: int) -> None:
    """Kill a child process and all that descends from it, in whatever session: servers, daemons of SLURM."""
    root = psutil.Process(process)
    root.suspend()  # it starts nothing any more
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
    """Whole lines of a file that grows; an empty one where there is no further line yet."""
    with path.open() as file:
        held = ""
        while True:
            held += file.readline()
            if held.endswith("\n"):
                yield held
                held = ""
            else:
                yield ""


class Suite:
    """What has been found so far."""

    def __init__(self, parts: list[Part], sides: int, options: Sequence[str]) -> None:
        self._todo, self._sides, self._options = list(parts), sides, options
        self._parts = parts
        self._started = self._shown = time.monotonic()
        self.failed: list[Outcome] = []
        self.counts: Counter[str] = Counter()

    def run(self, beside: subprocess.Popen[str] | None) -> None:
        """All parts, on one side less for as long as another process runs beside them."""
        running: list[Part] = []
        try:
            while self._todo or running:
                busy = beside is not None and beside.poll() is None
                while part := next_part(self._todo, running, max(1, self._sides - busy)):
                    self._todo.remove(part)
                    start(part, self._options)
                    running.append(part)
                running = [part for part in running if self._goes_on(part)]
                self._show(running)
                time.sleep(0.1)
        finally:
            for part in running:
                end_with_descendants(part.process)

    def _goes_on(self, part: Part) -> bool:
        """Note what the part has told; whether it has more to say."""
        done, status = os.waitpid(part.process, os.WNOHANG)
        assert part.told is not None
        while line := next(part.told):
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
        part.told.close()  # processes that are forked later would have the file open, too
        part.tests = len(part.outcomes)
        told = any(outcome.ending == "failed" for outcome in part.outcomes)
        if code not in _ENDINGS or (code in _FAILED and not told):
            said = f"pytest ended with {code}: {part.log.read_text(errors='replace')[-3000:]}"
            self._note(part, Outcome(part.running or part.name, "failed", False, False, said, 0.0))
        return False

    def _note(self, part: Part, outcome: Outcome) -> None:
        part.outcomes.append(outcome)
        part.running = ""
        self.counts[outcome.ending] += 1
        if outcome.ending == "failed":
            self.failed.append(outcome)
            last = outcome.said.splitlines()[-_SHOWN_LINES:]
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

    def again(self, folder: Path) -> list[Outcome]:
        """Run what waits and failed once more, each test by itself; those that passed."""
        unsteady: list[Outcome] = []
        for number, outcome in enumerate([outcome for outcome in self.failed if outcome.waits]):
            print(f"once more, by itself: {outcome.test}", flush=True)
            (file,) = {f for part in self._parts if outcome in part.outcomes for f in part.files if is_of(outcome, f)}
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
    """Move this process's memory into large pages: a fork copies fewer entries of page tables then, and takes 11 ms in
    place of 37. A kernel that cannot (before Linux 6.1) leaves it where it is."""
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
    """Processes that take all of a core that they are given, for as long as the context lasts."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def files_of(name: str) -> list[str]:
    """A file of tests, or those of a folder."""
    if not Path(ROOT, name).is_dir():
        return [name]
    return [os.path.relpath(path, ROOT) for path in sorted(Path(ROOT, name).rglob("test_*.py"))]


def is_of(outcome: Outcome, file: str) -> bool:
    """Whether a test is one of a file's; pytest names files beginning at a folder of its choice."""
    return Path(file).as_posix().endswith(outcome.test.partition("::")[0])


def judged(suite: Suite, unsteady: Sequence[Outcome], parts: Sequence[Part]) -> int:
    """Print what was found; the exit code."""
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    for reason, count in Counter(o.said.partition("\n")[0] for o in outcomes if o.ending == "skipped").items():
        print(f"skipped {count}: {reason}")
    for outcome in suite.failed:
        print(f"\n{'=' * 20} {outcome.test}\n{outcome.said}")
    if unsteady:
        print(f"\nunsteady: {len(unsteady)}, at most {MOST_UNSTEADY}")
    for outcome in unsteady:
        print(f"{'-' * 20} {outcome.test}\n{outcome.said}")
    code = int(bool(suite.failed) or len(unsteady) > MOST_UNSTEADY)
    counts = suite.counts
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)
    return code


def print_dearest(parts: Sequence[Part], count: int) -> None:
    """Print the tests that took most CPU time, fixtures that they were the first to need included."""
    outcomes = sorted((outcome for part in parts for outcome in part.outcomes), key=lambda x: -x.cpu_seconds)
    for outcome in outcomes[:count]:
        print(f"{outcome.cpu_seconds:6.1f} CPU s {outcome.seconds:6.1f} s  {outcome.test}")


def by_file(parts: Sequence[Part], *, exhaustive: bool) -> dict[str, dict[str, Any]]:
    """Seconds, CPU seconds and number of the tests that are marked so or are not."""
    found: dict[str, dict[str, Any]] = {}
    nothing = {"cpu_seconds": 0.0, "seconds": 0.0, "tests": 0}
    for part in parts:
        for outcome in part.outcomes:
            if outcome.exhaustive == exhaustive:
                of_file = found.setdefault(outcome.test.partition("::")[0], {**nothing})
                of_file["cpu_seconds"] = round(of_file["cpu_seconds"] + outcome.cpu_seconds, 1)
                of_file["seconds"] = round(of_file["seconds"] + outcome.seconds, 1)
                of_file["tests"] += 1
    return dict(sorted(found.items()))


def with_those_of(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What is known of each file, in order, with what was found of some in place of it."""
    return dict(sorted((known | found).items()))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def note_exhaustive(parts: Sequence[Part]) -> None:
    """Keep of each file that its exhaustive tests held at this commit today, where all of them passed at once; what is
    known of other files stays, where these have such tests."""
    commit = _git("rev-parse", "--short", "HEAD")
    if _git("status", "--porcelain", "--", ".", ":!tests/house/exhaustive.json"):  # which the file before wrote
        commit += "-dirty"
    known = json.loads(EXHAUSTIVE.read_text()) if EXHAUSTIVE.exists() else {}
    known = {file: known[file] for file in known if Path(ROOT, file).exists() and has_exhaustive(Path(ROOT, file))}
    asked = [outcome for part in parts for outcome in part.outcomes if outcome.exhaustive]
    unproven = {outcome.test.partition("::")[0] for outcome in asked if outcome.ending != "passed"}
    held = {"commit": commit, "date": str(datetime.now(UTC).date())}
    found = {file: of | held for file, of in by_file(parts, exhaustive=True).items() if file not in unproven}
    EXHAUSTIVE.write_text(json.dumps(with_those_of(known, found), indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="or a folder")
    parser.add_argument("--quick", action="store_true", help="only what is quick; see tests/README.md")
    parser.add_argument("--all", action="store_true", help="also what is exhaustive; see tests/README.md")
    parser.add_argument("--exhaustive", action="store_true", help="only what is; see tests/README.md")
    parser.add_argument("--light", action="store_true", help="only what depends on versions; see tests/README.md")
    parser.add_argument("--waits", action="store_true", help="only what is marked so; see tests/README.md")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="N busy loops beside the tests")
    parser.add_argument("--sides", type=int, default=(os.cpu_count() or 1) + 1, help="files at a time")
    parser.add_argument("--types", action=argparse.BooleanOptionalAction, default=True, help="mypy beside the tests")
    parser.add_argument("--measure", action="store_true", help="write seconds.json anew")
    parser.add_argument("--dearest", type=int, default=0, metavar="N", help="list the N tests that took most CPU time")
    given = parser.parse_args()
    share_cores()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is running is ended then, too
    files = [file for name in given.files or ["tests"] for file in files_of(name)]
    for plugin in ("_hypothesis_pytestplugin", "hypothesis", "pytest_timeout"):
        importlib.import_module(plugin)  # which every process of pytest loads
    gc.collect()
    gc.freeze()  # collections in forked processes do not go through, and so copy, what was imported before the fork
    use_large_pages()
    if given.light:
        files = [file for file in files if "mark.versions" in Path(ROOT, file).read_text()]
    if given.waits:
        files = [file for file in files if "mark.waits" in Path(ROOT, file).read_text()]
    options = [f"--{name}" for name in ("quick", "all", "light") if getattr(given, name)]
    if given.exhaustive:
        files = [file for file in files if has_exhaustive(Path(ROOT, file))]
        options.append("--all")
    if marks := [mark for mark in ("exhaustive", "waits") if getattr(given, mark)]:
        options += ["-m", " and ".join(marks)]
    command = [sys.executable, "-m", "mypy"] if given.types else ["true"]
    types = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory(prefix="megappo-tests-") as scratch, busy_loops(given.busy) as loops:
        parts = parts_of(files, Path(scratch))
        suite = Suite(parts, given.sides, options)
        suite.run(types)
        unsteady = suite.again(Path(scratch))
        said, _ = types.communicate()
        print(said, end="")
        code = judged(suite, unsteady, parts)
        used = cpu_seconds(os.getpid()) - sum(map(cpu_seconds, loops))
    print_dearest(parts, given.dearest)
    if given.measure:
        others = json.loads(SECONDS.read_text()) if given.files else {}
        known = {file: others[file] for file in others if Path(ROOT, file).exists()}
        SECONDS.write_text(json.dumps(with_those_of(known, by_file(parts, exhaustive=False)), indent=1) + "\n")
    if given.exhaustive or given.all:
        note_exhaustive(parts)
    print(f"{used / 60:.1f} core-minutes")
    return code or types.returncode


if __name__ == "__main__":
    sys.exit(main())
