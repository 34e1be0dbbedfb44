"""Measure the share of small changes to the code that tests detect, with a seeded sample of mutants of Cosmic Ray.

Usage: python tests/house/mutants.py AREA [--sample 40] [--seed 1] [--jobs 1]      (see tests/README.md)

Cosmic Ray makes the changes. A run of all changes, each in a new Python process that imports torch, would take days.
This program therefore draws random places in the code and one change per place. The tests of the area run on a copy of
the repository, in a process that is forked after the import of torch.
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

# No module of the repository may be imported in this file. Otherwise the tests of a copy would use this module.
ROOT = Path(__file__).resolve().parents[2]
AREAS = {path.stem: path for path in sorted((ROOT / ".cosmic-ray").glob("*.toml"))}
# Operators, comparisons and constants. The other operators of Cosmic Ray test whether a name is used.
KINDS = ("Replace", "NumberReplacer", "AddNot", "ZeroIterationForLoop")

Ending = Literal["passed", "failed", "hung"]
LABELS: dict[Ending, str] = {"passed": "SURVIVED", "failed": "noticed", "hung": "hung"}

Position = tuple[int, int]
"""Line (from 1) and column (from 0, in characters)."""


@dataclass(frozen=True)
class Span:
    """Part of a source file."""

    start: Position
    end: Position

    def contains(self, position: Position) -> bool:
        """Return whether the span contains the position."""
        return self.start <= position < self.end


def without_effect(source: str) -> list[Span]:
    """Return the spans without effect at run time: annotations (strings with `from __future__ import annotations`),
    code for type checkers, and arguments of `dataclass`, such as `frozen`."""
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


def draw_mutants(items: Iterable[Any], sample: int, seed: str) -> list[Any]:
    """Draw places with the seed, at most `sample`, and one mutant per place.

    Places are drawn first because an addition has ten mutants and a number only two.
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
        if not any(span.contains(change.start_pos) for span in spans[change.module_path]):
            key = str(change.module_path), tuple(change.start_pos), kind.split("_")[0]
            places.setdefault(key, []).append(item)
    chance = random.Random(seed)
    chosen = chance.sample(sorted(places), min(sample, len(places)))
    by_name = [sorted(places[key], key=lambda i: (i.mutations[0].operator_name, i.mutations[0].occurrence))
               for key in sorted(chosen)]  # fmt: skip
    return [chance.choice(candidates) for candidates in by_name]


def copied_repository(target: Path) -> Path:
    """Copy all files that git tracks or would add. The mutants are made in this copy."""
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
    """Return the sample as work items of Cosmic Ray."""
    from cosmic_ray.work_db import use_db

    session = copy / "mutants.sqlite"
    subprocess.run([sys.executable, "-m", "cosmic_ray.cli", "init", config, session], cwd=copy, check=True)
    folder = Path.cwd()
    os.chdir(copy)
    try:
        with use_db(session) as database:
            return draw_mutants(database.work_items, sample, seed)
    finally:
        os.chdir(folder)


@dataclass(frozen=True)
class Verdict:
    """Result of the tests of a mutant."""

    mutant: Any
    ending: Ending
    diff: str


_free_copies: Any = None
"""Copies that no worker process uses. Defined in worker processes."""


def _start_worker(copies: Any) -> None:
    global _free_copies
    _free_copies = copies


def worker_pool(copies: Sequence[Path]) -> ProcessPoolExecutor:
    """Return a pool of worker processes. Each worker uses a separate copy. Tests in the workers can start processes,
    which is not possible with multiprocessing.Pool."""
    fork = multiprocessing.get_context("fork")
    free = fork.SimpleQueue()
    for copy in copies:
        free.put(copy)
    return ProcessPoolExecutor(len(copies), fork, _start_worker, (free,))


def judge(work: tuple[Any, Sequence[str], float]) -> Verdict:
    """Make a change in a copy, run the tests, and revert the change."""
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
    """Run the tests of a copy in a forked process, in which torch is already imported."""
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
    """Import the external modules of the tests once. Use one thread, because a forked process has one thread."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    sys.dont_write_bytecode = True
    for name in ("torch", "pytest", "hypothesis", "pydantic"):
        importlib.import_module(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel mutants, each in a separate copy")
    options = parser.parse_args()
    config = AREAS[options.area]
    settings = tomllib.loads(config.read_text())["cosmic-ray"]
    arguments = shlex.split(settings["test-command"])[3:]  # python -m pytest
    import_what_tests_import()
    with tempfile.TemporaryDirectory(prefix="mutants-") as work:
        copies = [copied_repository(Path(work) / str(job)) for job in range(options.jobs)]
        noticed = 0
        with worker_pool(copies) as pool:
            unchanged = pool.submit(run_tests, copies[0], arguments, 10 * settings["timeout"])
            if unchanged.result() != "passed":
                raise SystemExit(f"the tests fail before any change: {settings['test-command']}")
            mutants = sampled_mutants(copies[0], config, options.sample, f"{options.area}-{options.seed}")
            todo = [(item, arguments, settings["timeout"]) for item in mutants]
            for number, verdict in enumerate(pool.map(judge, todo), 1):
                noticed += verdict.ending != "passed"
                change = verdict.mutant.mutations[0]
                where = f"{change.module_path}:{change.start_pos[0]} {change.operator_name}"
                print(f"{number}/{len(mutants)} {LABELS[verdict.ending]:<8} {where}", flush=True)
                if verdict.ending == "passed":
                    print(verdict.diff, flush=True)
    print(f"{options.area}, seed {options.seed}: {noticed} of {len(mutants)} noticed ({noticed / len(mutants):.0%})")


if __name__ == "__main__":
    main()
