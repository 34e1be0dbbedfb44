"""What share of small changes to the code its own tests notice: a seeded sample of Cosmic Ray's mutants.

Usage: python tests/mutants.py AREA [--sample 40] [--seed 1] [--jobs 1]      (README.md beside this file says more)

Cosmic Ray knows the changes and makes them; all of them would take days. So this picks places in the code at random,
at each of them one change, and runs the area's tests on a copy of the repository for each.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]
AREAS = {path.stem: path for path in sorted((ROOT / ".cosmic-ray").glob("*.toml"))}
# Operators, comparisons and constants. Other operators of Cosmic Ray ask whether a name is used at all.
KINDS = ("Replace", "NumberReplacer", "AddNot", "ZeroIterationForLoop")

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


def never_evaluated(source: str) -> list[Span]:
    """Annotations, which are text in files that import them from the future, and what only type checkers read."""
    lines, spans = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            parts = [node]
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
            spans[change.module_path] = never_evaluated(Path(change.module_path).read_text())
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


def environment(copy: Path) -> dict[str, str]:
    """That of the tests, with the copy's packages in front."""
    return {**os.environ, "PYTHONPATH": f"{copy}:{copy / 'kernels'}", "OMP_NUM_THREADS": "1"}


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


def outcomes(copies: list[Path], config: Path, mutants: list[Any]) -> Iterator[tuple[Any, bool, str]]:
    """Each mutant, whether the tests noticed it, and its diff; as many at a time as there are copies."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def judge(item: Any) -> tuple[Any, bool, str]:
        copy = free.get()
        change = item.mutations[0]
        words = [sys.executable, __file__, "--one", config, change.module_path, change.operator_name]
        done = subprocess.run(
            [*map(str, words), str(change.occurrence)], cwd=copy, env=environment(copy), capture_output=True, text=True
        )
        free.put(copy)
        verdict, _, diff = done.stdout.partition("\n")
        if verdict not in ("killed", "survived"):
            raise RuntimeError(f"no verdict on {words}: {done.stdout}{done.stderr}")
        return item, verdict == "killed", diff

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(judge, mutants)


def judge_one(config: str, module: str, operator: str, occurrence: str) -> None:
    """In a process of its own, in a copy: make one change, run the tests, take the change back, say what came of it."""
    from cosmic_ray.config import load_config
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import MutationSpec

    settings = load_config(config)
    change = MutationSpec(module, operator, int(occurrence), (1, 0), (1, 1))
    result = mutate_and_test([change], settings.test_command, settings.timeout)
    if result.test_outcome is None or result.worker_outcome != "normal":
        raise RuntimeError(f"{result.worker_outcome}: {result.output}")
    print(result.test_outcome.value, result.diff, sep="\n")


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        judge_one(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each on a copy of its own")
    given = parser.parse_args()
    config = AREAS[given.area]
    with tempfile.TemporaryDirectory(prefix="mutants-") as work:
        copies = [copied_repository(Path(work) / str(job)) for job in range(given.jobs)]
        from cosmic_ray.config import load_config

        unchanged = shlex.split(load_config(config).test_command)
        subprocess.run(unchanged, cwd=copies[0], env=environment(copies[0]), check=True)
        mutants = sampled_mutants(copies[0], config, given.sample, f"{given.area}-{given.seed}")
        killed = 0
        for number, (item, noticed, diff) in enumerate(outcomes(copies, config, mutants), 1):
            killed += noticed
            change = item.mutations[0]
            where = f"{change.module_path}:{change.start_pos[0]} {change.operator_name}"
            print(f"{number}/{len(mutants)} {'noticed ' if noticed else 'SURVIVED'} {where}", flush=True)
            if not noticed:
                print(diff, flush=True)
    print(f"{given.area}, seed {given.seed}: {killed} of {len(mutants)} noticed ({killed / len(mutants):.0%})")


if __name__ == "__main__":
    main()
