"""Test suite runner: files run once, all results are reported, and a few unsteady tests are allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.house.suite import (
    Part,
    end_with_descendants,
    files_of,
    next_part,
    note_exhaustive,
    parts_of,
    with_new_results,
)
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
def test_stays_wrong(): raise OSError("no connection")
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
    loops = next(loops for loops in map(loops_of, psutil.Process().parents()) if loops)
    pathlib.Path(__file__).with_name("loops").write_text(" ".join(str(loop.pid) for loop in loops))
    while sum(sum(loop.cpu_times()[:2]) for loop in loops) < 4: time.sleep(0.1)
"""
COUNTS = """
import collections, os

def test_few_files_are_open():
    with os.scandir("/proc/self/fd") as entries:
        names = [os.readlink(entry.path) for entry in entries]
    of_suites = collections.Counter(os.path.dirname(name) for name in names if name.endswith(".events"))
    assert max(of_suites.values(), default=0) <= 3  # an outer suite has one file
"""


def suite(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    """Return the exit code and the output."""
    paths = []
    for name, text in files.items():
        paths.append(folder / f"test_{name}.py")
        paths[-1].write_text(text)
    done = start("tests.house.suite", "--no-types", "--sides", "2", *options, *paths)
    return done.returncode, done.stdout


def test_results_are_summarised_in_one_line(tmp_path: Path) -> None:
    code, output = suite(tmp_path, steady=STEADY, wrong=WRONG)
    assert code == 1
    assert "\n1 passed, 2 failed, 1 skipped\n" in output
    assert "skipped 1: no such device" in output
    assert output.index("FAILED") < output.index("rerun alone") < output.index("=" * 20), "failures are printed at once"
    assert "AssertionError: the sum" in output and "OSError: no connection" in output
    assert "unsteady" not in output


def test_exhaustive_option_runs_only_exhaustive_tests(tmp_path: Path) -> None:
    """Files without exhaustive tests are not loaded."""
    option = 'def pytest_addoption(parser): parser.addoption("--all", action="store_true")'
    (tmp_path / "conftest.py").write_text(option)
    before = (ROOT / "tests/house/exhaustive.json").read_text()
    code, output = suite(tmp_path, "--exhaustive", deep=EXHAUSTIVE, broken=BROKEN)
    assert (ROOT / "tests/house/exhaustive.json").read_text() == before
    assert code == 1 and "\n1 passed, 1 failed, 0 skipped\n" in output


def test_waiting_tests_run_with_busy_loops(tmp_path: Path) -> None:
    """The loops run during the tests and end with the tests. The CPU time of the loops is not counted."""
    code, output = suite(tmp_path, "--waits", "--busy", "2", steady=STEADY, loaded=LOADED, broken=BROKEN)
    assert code == 0 and output.startswith("1 passed, 0 failed, 0 skipped\n"), output
    assert float(output.split()[-2]) < 0.1, "core-minutes"
    loops = (tmp_path / "loops").read_text().split()
    assert len(loops) == 2 and not any(psutil.pid_exists(int(loop)) for loop in loops)


def test_successful_exhaustive_tests_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test files with a failed or skipped test, and files without exhaustive tests, are excluded."""
    known = {"cpu_seconds": 2.0, "seconds": 1.0, "tests": 1, "commit": "0a1b2c3", "date": "2026-01-31"}
    deep, shallow = "tests/runs/test_resume.py", "tests/algo/test_golden.py"
    path = tmp_path / "exhaustive.json"
    path.write_text(json.dumps({deep: known, shallow: known, "tests/test_gone.py": known}))
    monkeypatch.setattr("tests.house.suite.EXHAUSTIVE", path)
    part = Part([], 0.0, 0, tmp_path)
    endings = {"a": ["passed", "passed"], "b": ["passed", "skipped"], "d": ["passed", "failed"]}
    marked = [(file, ending, True) for file, results in endings.items() for ending in results]
    for file, ending, exhaustive in [*marked, ("a", "passed", False), ("c", "passed", False)]:
        part.outcomes.append(Outcome(f"tests/{file}.py::test", ending, False, exhaustive, "", 1.5, 2.0))
    note_exhaustive([part])
    results = json.loads(path.read_text())
    assert [*results] == ["tests/a.py", deep] and results[deep] == known
    of = results["tests/a.py"]
    assert (of["cpu_seconds"], of["seconds"], of["tests"]) == (3.0, 4.0, 2)
    assert of["commit"] and of["date"] > known["date"]


def test_event_files_of_finished_parts_are_closed(tmp_path: Path) -> None:
    """Open event files of earlier parts would cause file descriptors above 255 in the last part."""
    code, output = suite(tmp_path, **{f"part_{number}": COUNTS for number in range(8)})
    assert code == 0 and output.startswith("8 passed"), output


@pytest.mark.parametrize(("count", "code"), [(3, 0), (4, 1)])
def test_failure_with_successful_rerun_is_unsteady(tmp_path: Path, count: int, code: int) -> None:
    exit_code, output = suite(tmp_path, steady=STEADY, unsteady=UNSTEADY.format(count=count))
    assert exit_code == code
    assert f"{1 + count} passed, 0 failed, 1 skipped" in output
    assert f"unsteady: {count}, at most 3" in output and "AssertionError: not yet" in output.split("unsteady:")[1]


def test_permanent_failure_does_not_affect_unsteady_tests(tmp_path: Path) -> None:
    code, output = suite(tmp_path, a_wrong=WRONG, unsteady=UNSTEADY.format(count=2))
    assert code == 1 and "\n2 passed, 2 failed, 0 skipped\n" in output
    assert output.count("rerun alone") == 3


def test_failed_test_without_marker_is_not_rerun(tmp_path: Path) -> None:
    code, output = suite(tmp_path, unsteady=UNSTEADY.format(count=1).replace("@pytest.mark.waits\n", ""))
    assert (code, "0 passed, 1 failed, 0 skipped" in output, "rerun" in output) == (1, True, False)


def test_crashed_process_and_unreadable_file_fail(tmp_path: Path) -> None:
    code, output = suite(tmp_path, steady=STEADY, dies=DIES, broken=BROKEN)
    assert code == 1 and "1 passed, 2 failed, 1 skipped" in output
    assert "test_takes_its_process_down" in output and "pytest ended with code 7" in output
    assert "No module named 'no_such_module'" in output


ADOPTS = """
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
command = f"echo $$ >{sys.argv[1]}.part && mv {sys.argv[1]}.part {sys.argv[1]}; exec sleep 600"
subprocess.run(["setsid", "--fork", "bash", "-c", command])
time.sleep(600)
"""
"""Program that adopts its descendants, like a process of the suite, and starts a daemon whose parent ends."""


def test_stopped_suite_leaves_no_processes(tmp_path: Path) -> None:
    number = tmp_path / "number"
    child = subprocess.Popen([sys.executable, "-c", ADOPTS, number])
    while not number.exists():
        assert child.poll() is None
        time.sleep(0.02)
    daemon = psutil.Process(int(number.read_text()))
    assert os.getsid(daemon.pid) != os.getsid(child.pid)
    end_with_descendants(child.pid)
    assert child.wait(10) < 0 and not psutil.wait_procs([daemon], timeout=10)[1]


def test_folder_is_expanded_to_files() -> None:
    files = files_of("tests/house")
    assert "tests/house/test_suite.py" in files and all(file.startswith("tests/house/test_") for file in files)
    assert files_of("tests/house/test_suite.py") == ["tests/house/test_suite.py"]
    assert files == [file for file in files_of("tests") if file.startswith("tests/house/")]


def test_slowest_files_start_first(tmp_path: Path) -> None:
    """Files that share a slow fixture run in one process."""
    files = ["tests/algo/test_golden.py", "tests/slurm/test_slurm.py", "tests/slurm/test_acceptance.py", "tests/new.py"]
    parts = parts_of(files, tmp_path)
    assert sorted(file for part in parts for file in part.files) == sorted(files)
    assert parts[0].files == files[1:3] and parts[0].name == "tests/slurm"
    assert [part.seconds for part in parts] == sorted((part.seconds for part in parts), reverse=True)


def test_duration_includes_waiting_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_one_waiting_part_runs_in_addition(tmp_path: Path) -> None:
    """Further parts of this kind start if nothing else is left."""
    todo = [Part([name], 0.0, 1, tmp_path, name.startswith("waits")) for name in ("a", "waits-1", "b", "waits-2", "c")]
    order, running = [], list[Part]()
    while part := next_part(todo, running, 2):
        todo.remove(part)
        running.append(part)
        order.append(part.name)
    assert order == ["waits-1", "a", "b"]
    running.pop()  # b is done
    other, last = todo
    assert (other.name, last.name) == ("waits-2", "c")
    assert next_part(todo, running, 2) is last
    assert next_part([other], running, 2) is other
    assert next_part([other], [*running, last], 2) is None
    assert next_part([], [], 2) is None


def test_new_measurements_replace_known_measurements() -> None:
    known = {"b": {"cpu_seconds": 2.0, "tests": 1}, "c": {"cpu_seconds": 3.0, "tests": 1}}
    results = with_new_results(known, {"c": {"cpu_seconds": 1.0, "tests": 2}, "a": {"cpu_seconds": 4.0, "tests": 1}})
    assert [*results] == ["a", "b", "c"] and results["b"] == known["b"] and results["c"]["cpu_seconds"] == 1.0
