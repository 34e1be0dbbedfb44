"""What share of small changes to the code its own tests notice: a seeded sample of Cosmic Ray's mutants.

Usage: python tests/house/mutants.py AREA [--sample 40] [--seed 1] [--jobs 1]      (tests/README.md says more)

Cosmic Ray knows the changes and makes them; all of them, each in a Python that imports torch again, would take days. So
this picks places in the code at random, at each of them one change, and runs the area's tests on a copy of the
repository, in a process that is forked when torch is there.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Nothing of the repository may be imported here, or the tests of a copy would find it instead of the copy's.
ROOT = Path(__file__).resolve().parents[2]
AREAS = {path.stem: path for path in sorted((ROOT / ".cosmic-ray").glob("*.toml"))}
# Operators, comparisons and constants. Other operators of Cosmic Ray ask whether a name is used at all.
KINDS = ("Replace", "NumberReplacer", "AddNot", "ZeroIterationForLoop")

Ending = Literal["passed", "failed", "hung"]
WORDS: dict[Ending, str] = {"passed": "SURVIVED", "failed": "noticed", "hung": "hung"}

Position = tuple[int, int]
"""Line from 1 and column from 0, in characters."""


@dataclass(frozen=True)
class Span:
    """A part of a source file."""

    start: Position
    end: Position

    def holds(self, position: Position) -> bool:
        """Whether the position lies in it."""
        return self.start <= position < self.end


def without_effect(source: str) -> list[Span]:
    """Annotations, which are text in files that import them from the future, what only type checkers read, and whether
    a dataclass is frozen, which changes nothing for those that do not try."""
    lines, spans = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            parts = [node]
        elif isinstance(node, ast.ClassDef):
            parts = [d for d in node.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func) == "dataclass"]
        spans += [_span(lines, part) for part in parts if part is not None]
    return spans


def _span(lines: list[str], node: Any) -> Span:
    def position(line: int, column_bytes: int) -> Position:
        return line, len(lines[line - 1].encode()[:column_bytes].decode())

    return Span(position(node.lineno, node.col_offset), position(node.end_lineno, node.end_col_offset))


def drawn(items: Iterable[Any], sample: int, seed: str) -> list[Any]:
    """One mutant at each of `sample` places, drawn by the seed.

    Drawn by places, as an addition can become ten other things and a number only two.
    """
    spans: dict[Path, list[Span]] = {}
    places: dict[tuple[str, Position, str], list[Any]] = {}
    for item in items:
        change = item.mutations[0]
        kind = change.operator_name.removeprefix("core/")
        if not kind.startswith(KINDS):
            continue
        if change.module_path not in spans:
            spans[change.module_path] = without_effect(Path(change.module_path).read_text())
        if not any(span.holds(change.start_pos) for span in spans[change.module_path]):
            key = str(change.module_path), tuple(change.start_pos), kind.split("_")[0]
            places.setdefault(key, []).append(item)
    chance = random.Random(seed)
    chosen = chance.sample(sorted(places), min(sample, len(places)))
    by_name = [sorted(places[key], key=lambda i: (i.mutations[0].operator_name, i.mutations[0].occurrence))
               for key in sorted(chosen)]  # fmt: skip
    return [chance.choice(candidates) for candidates in by_name]


def copied_repository(target: Path) -> Path:
    """A copy of all files that git knows or would add, in which the mutants are made."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in names:
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def sampled_mutants(copy: Path, config: Path, sample: int, seed: str) -> list[Any]:
    """The sample, as Cosmic Ray's work items."""
    from cosmic_ray.work_db import use_db

    session = copy / "mutants.sqlite"
    subprocess.run([sys.executable, "-m", "cosmic_ray.cli", "init", config, session], cwd=copy, check=True)
    here = Path.cwd()
    os.chdir(copy)
    try:
        with use_db(session) as database:
            return drawn(database.work_items, sample, seed)
    finally:
        os.chdir(here)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Any
    ending: Ending
    diff: str


_free_copies: Any = None
"""In a process that judges: the copies that none of them works in."""


def _begin_judging(copies: Any) -> None:
    global _free_copies
    _free_copies = copies


def judging(copies: Sequence[Path]) -> ProcessPoolExecutor:
    """Processes that judge at the same time, each in a copy of its own. Tests in them may start processes, which
    those of multiprocessing.Pool may not."""
    fork = multiprocessing.get_context("fork")
    free = fork.SimpleQueue()
    for copy in copies:
        free.put(copy)
    return ProcessPoolExecutor(len(copies), fork, _begin_judging, (free,))


def judge(work: tuple[Any, Sequence[str], float]) -> Verdict:
    """Make the change in a copy, run the tests, take the change back."""
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    item, arguments, timeout_seconds = work
    change, copy = item.mutations[0], _free_copies.get()
    operator = get_operator(change.operator_name)(**change.operator_args)
    with use_mutation(copy / change.module_path, operator, change.occurrence) as (before, after):
        assert after is not None, change
        ending = run_tests(copy, arguments, timeout_seconds)
    _free_copies.put(copy)
    name = str(change.module_path)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, lineterm="")
    return Verdict(item, ending, "\n".join(lines))


def run_tests(copy: Path, arguments: Sequence[str], timeout_seconds: float) -> Ending:
    """How the tests of a copy end, in a child that finds torch imported already."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(copy)
        os.environ["PYTHONPATH"] = f"{copy}:{copy / 'kernels'}"
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        import pytest

        code = pytest.main(list(arguments))
        os._exit(int(code))
    deadline = time.monotonic() + timeout_seconds
    done, status = os.waitpid(child, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.05)
        done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "hung"
    return "passed" if status == 0 else "failed"


def import_what_tests_import() -> None:
    """Once for all, but nothing of the repository. One thread, as forked children have one."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    sys.dont_write_bytecode = True
    for name in ("torch", "pytest", "hypothesis", "pydantic"):
        importlib.import_module(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each on a copy of its own")
    given = parser.parse_args()
    config = AREAS[given.area]
    settings = tomllib.loads(config.read_text())["cosmic-ray"]
    arguments = shlex.split(settings["test-command"])[3:]  # python -m pytest
    import_what_tests_import()
    with tempfile.TemporaryDirectory(prefix="mutants-") as work:
        copies = [copied_repository(Path(work) / str(job)) for job in range(given.jobs)]
        noticed = 0
        with judging(copies) as pool:
            unchanged = pool.submit(run_tests, copies[0], arguments, 10 * settings["timeout"])
            if unchanged.result() != "passed":
                raise SystemExit(f"the tests fail without any change: {settings['test-command']}")
            mutants = sampled_mutants(copies[0], config, given.sample, f"{given.area}-{given.seed}")
            todo = [(item, arguments, settings["timeout"]) for item in mutants]
            for number, verdict in enumerate(pool.map(judge, todo), 1):
                noticed += verdict.ending != "passed"
                change = verdict.mutant.mutations[0]
                where = f"{change.module_path}:{change.start_pos[0]} {change.operator_name}"
                print(f"{number}/{len(mutants)} {WORDS[verdict.ending]:<8} {where}", flush=True)
                if verdict.ending == "passed":
                    print(verdict.diff, flush=True)
    print(f"{given.area}, seed {given.seed}: {noticed} of {len(mutants)} noticed ({noticed / len(mutants):.0%})")


if __name__ == "__main__":
    main()
