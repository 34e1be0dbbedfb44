"""The suite runs what it is given once, tells all that becomes of it, and lets few unsteady tests pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.house.suite import Part, end_with_descendants, files_of, next_part, note_exhaustive, parts_of, with_those_of
from tests.house.telling import Outcome
from tests.support.harness import start
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]

STEADY = """
import pytest, signal

def test_holds():
    assert all(signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP))

@pytest.mark.skip(reason="no such device")
def test_elsewhere(): pass
"""
UNSTEADY = """
import pathlib, pytest

@pytest.mark.waits
@pytest.mark.parametrize("number", range({count}))
def test_at_second_sight(number):
    seen = pathlib.Path(__file__).with_name(f"seen-{{number}}")
    known = seen.exists()
    seen.touch()
    assert known, "not yet"
"""
WRONG = """
import pytest

def test_is_wrong(): assert 1 + 1 == 3, "the sum"

@pytest.mark.waits
def test_stays_wrong(): raise OSError("still nobody there")
"""
DIES = "import os\n\ndef test_takes_its_process_down(): os._exit(7)\n"
BROKEN = "import no_such_module\n"
EXHAUSTIVE = """
import pytest

@pytest.mark.parametrize("deep", [False, pytest.param(True, marks=pytest.mark.{mark})])
def test_runs_deep_alone(deep): assert deep

@pytest.mark.{mark}
def test_is_wrong(): assert 1 + 1 == 3
""".format(mark="exhaustive")


LOADED = """
import pathlib, psutil, pytest, time

def loops_of(process):
    return [child for child in process.children() if child.cmdline()[-1:] == ["while True: pass"]]

@pytest.mark.waits
def test_busy_loops_are_busy():
    loops = next(found for found in map(loops_of, psutil.Process().parents()) if found)
    pathlib.Path(__file__).with_name("loops").write_text(" ".join(str(loop.pid) for loop in loops))
    while sum(sum(loop.cpu_times()[:2]) for loop in loops) < 4: time.sleep(0.1)
"""
COUNTS = """
import collections, os

def test_few_files_are_open():
    with os.scandir("/proc/self/fd") as found:
        names = [os.readlink(entry.path) for entry in found]
    of_suites = collections.Counter(os.path.dirname(name) for name in names if name.endswith(".told"))
    assert max(of_suites.values(), default=0) <= 3  # the suite that runs this one has its own
"""


def suite(folder: Path, *words: str, **files: str) -> tuple[int, str]:
    """The exit code and what is printed."""
    paths = []
    for name, text in files.items():
        paths.append(folder / f"test_{name}.py")
        paths[-1].write_text(text)
    done = start("tests.house.suite", "--no-types", "--sides", "2", *words, *paths)
    return done.returncode, done.stdout


def test_all_that_was_found_is_told_in_one_line(tmp_path: Path) -> None:
    code, said = suite(tmp_path, steady=STEADY, wrong=WRONG)
    assert code == 1
    assert "\n1 passed, 2 failed, 1 skipped\n" in said
    assert "skipped 1: no such device" in said
    assert said.index("FAILED") < said.index("once more, by itself") < said.index("=" * 20), "told as they come"
    assert "AssertionError: the sum" in said and "OSError: still nobody there" in said
    assert "unsteady" not in said


def test_what_is_exhaustive_is_run_alone(tmp_path: Path) -> None:
    """Files without such tests are not read at all."""
    option = 'def pytest_addoption(parser): parser.addoption("--all", action="store_true")'
    (tmp_path / "conftest.py").write_text(option)
    before = (ROOT / "tests/house/exhaustive.json").read_text()
    code, said = suite(tmp_path, "--exhaustive", deep=EXHAUSTIVE, broken=BROKEN)
    assert (ROOT / "tests/house/exhaustive.json").read_text() == before
    assert code == 1 and "\n1 passed, 1 failed, 0 skipped\n" in said


def test_what_waits_is_run_alone_beside_busy_loops(tmp_path: Path) -> None:
    """Which are running meanwhile, have ended afterwards, and whose time is not the tests'."""
    code, said = suite(tmp_path, "--waits", "--busy", "2", steady=STEADY, loaded=LOADED, broken=BROKEN)
    assert code == 0 and said.startswith("1 passed, 0 failed, 0 skipped\n"), said
    assert float(said.split()[-2]) < 0.1, "core-minutes"
    loops = (tmp_path / "loops").read_text().split()
    assert len(loops) == 2 and not any(psutil.pid_exists(int(loop)) for loop in loops)


def test_files_whose_exhaustive_tests_all_held_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are not: neither those of which one failed or was skipped, nor those without such tests any more."""
    known = {"cpu_seconds": 2.0, "seconds": 1.0, "tests": 1, "commit": "0a1b2c3", "date": "2026-01-31"}
    deep, shallow = "tests/runs/test_resume.py", "tests/algo/test_golden.py"
    path = tmp_path / "exhaustive.json"
    path.write_text(json.dumps({deep: known, shallow: known, "tests/test_gone.py": known}))
    monkeypatch.setattr("tests.house.suite.EXHAUSTIVE", path)
    part = Part([], 0.0, 0, tmp_path)
    endings = {"a": ["passed", "passed"], "b": ["passed", "skipped"], "d": ["passed", "failed"]}
    told = [(file, ending, True) for file, found in endings.items() for ending in found]
    for file, ending, exhaustive in [*told, ("a", "passed", False), ("c", "passed", False)]:
        part.outcomes.append(Outcome(f"tests/{file}.py::test", ending, False, exhaustive, "", 1.5, 2.0))
    note_exhaustive([part])
    found = json.loads(path.read_text())
    assert [*found] == ["tests/a.py", deep] and found[deep] == known
    of = found["tests/a.py"]
    assert (of["cpu_seconds"], of["seconds"], of["tests"]) == (3.0, 4.0, 2)
    assert of["commit"] and of["date"] > known["date"]


def test_files_of_parts_that_are_over_are_closed(tmp_path: Path) -> None:
    """Those of all others were open in the process of the last part, whose descriptors had numbers above 255."""
    code, said = suite(tmp_path, **{f"part_{number}": COUNTS for number in range(8)})
    assert code == 0 and said.startswith("8 passed"), said


@pytest.mark.parametrize(("count", "code"), [(3, 0), (4, 1)])
def test_what_passes_at_the_second_time_is_unsteady(tmp_path: Path, count: int, code: int) -> None:
    found, said = suite(tmp_path, steady=STEADY, unsteady=UNSTEADY.format(count=count))
    assert found == code
    assert f"{1 + count} passed, 0 failed, 1 skipped" in said
    assert f"unsteady: {count}, at most 3" in said and "AssertionError: not yet" in said.split("unsteady:")[1]


def test_one_that_stays_wrong_is_not_held_against_the_others(tmp_path: Path) -> None:
    code, said = suite(tmp_path, a_wrong=WRONG, unsteady=UNSTEADY.format(count=2))
    assert code == 1 and "\n2 passed, 2 failed, 0 skipped\n" in said
    assert said.count("once more, by itself") == 3


def test_what_does_not_wait_has_one_chance(tmp_path: Path) -> None:
    code, said = suite(tmp_path, unsteady=UNSTEADY.format(count=1).replace("@pytest.mark.waits\n", ""))
    assert (code, "0 passed, 1 failed, 0 skipped" in said, "once more" in said) == (1, True, False)


def test_a_process_that_dies_and_a_file_that_cannot_be_read_fail(tmp_path: Path) -> None:
    code, said = suite(tmp_path, steady=STEADY, dies=DIES, broken=BROKEN)
    assert code == 1 and "1 passed, 2 failed, 1 skipped" in said
    assert "test_takes_its_process_down" in said and "pytest ended with 7" in said
    assert "No module named 'no_such_module'" in said


ADOPTS = """
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
told = f"echo $$ >{sys.argv[1]}.part && mv {sys.argv[1]}.part {sys.argv[1]}; exec sleep 600"
subprocess.run(["setsid", "--fork", "bash", "-c", told])
time.sleep(600)
"""
"""A process that adopts descendants, as one that keeps files of tests does, and a daemon whose parent has ended."""


def test_a_suite_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    number = tmp_path / "number"
    child = subprocess.Popen([sys.executable, "-c", ADOPTS, number])
    while not number.exists():
        assert child.poll() is None
        time.sleep(0.02)
    daemon = psutil.Process(int(number.read_text()))
    assert os.getsid(daemon.pid) != os.getsid(child.pid)
    end_with_descendants(child.pid)
    assert child.wait(10) < 0 and not psutil.wait_procs([daemon], timeout=10)[1]


def test_a_folder_is_its_files() -> None:
    found = files_of("tests/house")
    assert "tests/house/test_suite.py" in found and all(file.startswith("tests/house/test_") for file in found)
    assert files_of("tests/house/test_suite.py") == ["tests/house/test_suite.py"]
    assert found == [file for file in files_of("tests") if file.startswith("tests/house/")]


def test_what_takes_longest_begins(tmp_path: Path) -> None:
    """And files that share what takes long are run together."""
    files = ["tests/algo/test_golden.py", "tests/slurm/test_slurm.py", "tests/slurm/test_acceptance.py", "tests/new.py"]
    parts = parts_of(files, tmp_path)
    assert sorted(file for part in parts for file in part.files) == sorted(files)
    assert parts[0].files == files[1:3] and parts[0].name == "tests/slurm"
    assert [part.seconds for part in parts] == sorted((part.seconds for part in parts), reverse=True)


def test_what_waits_long_begins_before_what_computes_less_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "computes.py": {"cpu_seconds": 50.0, "seconds": 55.0, "tests": 1},
        "waits.py": {"cpu_seconds": 2.0, "seconds": 80.0, "tests": 1},
        "older.py": {"cpu_seconds": 60.0, "tests": 1},
    }
    (tmp_path / "seconds.json").write_text(json.dumps(known))
    monkeypatch.setattr("tests.house.suite.SECONDS", tmp_path / "seconds.json")
    parts = parts_of([*known], tmp_path)
    assert [part.name for part in parts] == ["waits.py", "older.py", "computes.py"]
    assert [part.mostly_waits for part in parts] == [True, False, False]


def test_one_that_mostly_waits_runs_beside_all_sides(tmp_path: Path) -> None:
    """The others of its kind when a side has nothing to compute."""
    todo = [Part([name], 0.0, 1, tmp_path, name.startswith("waits")) for name in ("a", "waits-1", "b", "waits-2", "c")]
    order, running = [], list[Part]()
    while part := next_part(todo, running, 2):
        todo.remove(part)
        running.append(part)
        order.append(part.name)
    assert order == ["waits-1", "a", "b"]
    running.pop()  # b is through
    other, last = todo
    assert (other.name, last.name) == ("waits-2", "c")
    assert next_part(todo, running, 2) is last
    assert next_part([other], running, 2) is other
    assert next_part([other], [*running, last], 2) is None
    assert next_part([], [], 2) is None


def test_what_was_measured_of_some_files_takes_the_place_of_what_was_known_of_them() -> None:
    known = {"b": {"cpu_seconds": 2.0, "tests": 1}, "c": {"cpu_seconds": 3.0, "tests": 1}}
    found = with_those_of(known, {"c": {"cpu_seconds": 1.0, "tests": 2}, "a": {"cpu_seconds": 4.0, "tests": 1}})
    assert [*found] == ["a", "b", "c"] and found["b"] == known["b"] and found["c"]["cpu_seconds"] == 1.0
