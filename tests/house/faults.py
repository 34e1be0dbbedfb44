"""Runs with one fault on one rank, at a point between two collectives.

Usage: python -m tests.house.faults [--runs RUN,...] [--kinds KIND[@WORDS],...] [--each N] [--seed N] [--note]
       python -m tests.house.faults --again N [--runs RUN,...] [--seed N]

After a fault, every rank must end within seconds with an error message that names the cause, or the run must continue.
The newest checkpoint must be complete. Each run is traced once without a fault. The points of a trace differ in the
function or in the preceding collective. For each run and kind of fault, `--each` points are drawn with the seed.
Points of rare collectives are as likely as others, and the ranks take turns. The exit code is 1 if a run hangs, ends
without the cause, or loses a checkpoint.

With `--again`, each run has a sequence of faults that end the run at random functions, and is resumed after each
fault. The result must be bitwise equal to a run without faults.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megappo.checkpoint.files import finished, problems
from megappo.cli import main as megappo
from megappo.errors import HANG, REQUEUE, USER_ERROR
from megappo.network.store import free_port
from tests.support import nursery  # noqa: F401 - imports the modules of a run once, before the forks
from tests.support.attempts import assert_same_run
from tests.support.config import TWO_TURNS
from tests.support.places import ROOT
from tests.support.striking import FAULT_MESSAGE, FAULTS, NAP_SECONDS, Fault, Point, strike, trace

RANKS = 2
WITHIN_SECONDS = 10.0
LIMIT_SECONDS, LIMIT_SECONDS_WITH_SERVERS = 6.0, 90.0
"""Timeout of each phase in runs with a `hang` fault. One phase includes the start of servers."""
STARTS_WITHIN_SECONDS = 180.0
"""Limit for the start of a run with servers."""
LEFT_WITHIN_SECONDS = 5.0
NOTED = ROOT / "tests" / "house" / "faults.json"
"""Record of the last successful run of this program with `--note`."""
_SHOWN = 12
_ENDING = ("raise", "full", "kill", "stop")
_STEPS_OF_EACH = 2
"""Steps for each fault: more than the average number of steps until a fault ends the run."""
_OF_A_CHECKPOINT = 150
"""Number of functions that the writer thread runs for two checkpoints."""
_SET_CHILD_SUBREAPER = 36
_SMALL = (
    "run.steps=2", "rollout.prompts_per_step=4", "actor.minibatch_sequences=16", "critic.minibatch_sequences=16",
    "data.validation.limit=4", "logging.tensorboard=false", "checkpoint.every_steps=1", "evaluation.every_steps=1",
)  # fmt: skip
_EPISODES = (
    *TWO_TURNS,
    "data.validation={source: 'configs/examples/10_tools/lookup.py:keys', limit: 4, options: {held_out: true}}",
)  # fmt: skip
RUNS = {
    "split": ("checkpoint.asynchronous=false",),
    "data": ("actor.layout={}", "critic.layout={}", "actor.optimizer.distributed=true"),
    "episodes": _EPISODES,
    "ahead": (
        *_EPISODES, "rollout.ahead=1", "algorithm.old_logprob=corrected", "data.validation=null", "evaluation=null",
        "rollout.engine=tests.support.talking:TalkingEngine",
    ),
    "flying": (
        "rollout.engine=tests.support.ticking:TickingEngine", "algorithm.old_logprob=corrected", "rollout.ahead=2",
        "rollout.max_lag=3",
    ),
    "resumed": ("actor.optimizer.schedule=constant", "run.steps=3"),
    "servers": (),
    "servers in flight": ("rollout.ahead=2", "rollout.max_lag=3"),
}  # fmt: skip
"""Settings of each run. split: the actor with TP2 and the critic with PP2. data: data parallelism. episodes: two turns
and a tool. ahead: episodes that start one step ahead. flying: prompts are always in flight. resumed: a run that is
resumed after its second step. servers: SGLang on the devices of the ranks. servers in flight: SGLang on separate
devices, with continuous generation. Checkpoints are asynchronous except in split."""
CONFIGURATIONS = {"servers": "sglang_quickstart", "servers in flight": "sglang_disaggregated"}
"""Configurations of the runs that do not use the quickstart."""


class Ended(NamedTuple):
    """End of all ranks of a run."""

    codes: list[int | None]
    """Exit code of each rank, or None if the rank did not end."""
    outputs: list[str]
    seconds: float | None
    """Time from the fault to the end of the last rank. None if the point was not reached."""
    newest: int
    """Step of the newest checkpoint at the time of the fault."""
    left: list[str]
    """Command lines of processes that were still running after the ranks ended."""


def rank_main(rank: int, port: int, arguments: Sequence[str], folder: Path, fault: Fault | None) -> None:
    """Run one rank. With a fault, the given rank receives the fault. Without a fault, all ranks write traces."""
    outputs = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(outputs, 1)
    os.dup2(outputs, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if fault is None:
        trace(folder / f"trace-{rank}")
    elif fault.rank == rank:
        strike(fault, folder / "run", folder / "struck")
    sys.exit(megappo(list(arguments)))


def run(name: str, folder: Path, fault: Fault | None, *more: str) -> Ended:
    """Run all ranks in a folder, until the run ends or exceeds its time limit."""
    hangs = fault is not None and fault.kind == "hang"
    limits = [f"runtime.phase_timeout_seconds={_limit(name):g}"] if hangs else []
    arguments = [
        "train", f"configs/{CONFIGURATIONS.get(name, 'quickstart')}.yaml", f"run.directory={folder / 'run'}", *_SMALL,
        *RUNS[name], *limits, *more,
    ]  # fmt: skip
    context, port = multiprocessing.get_context("fork"), free_port("127.0.0.1")
    ranks = [context.Process(target=rank_main, args=(r, port, arguments, folder, fault)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    latest, struck = time.monotonic() + STARTS_WITHIN_SECONDS, folder / "struck"
    at: float | None = None
    while any(process.is_alive() for process in ranks) and time.monotonic() < latest:
        if at is None and struck.exists():
            at = json.loads(struck.read_text())["seconds"]
            ends = fault is not None and fault.kind != "nap"
            latest = at + (3 * WITHIN_SECONDS + hangs * _limit(name) if ends else STARTS_WITHIN_SECONDS)
        time.sleep(0.02)
    ended = time.monotonic()
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    report: dict[str, Any] = json.loads(struck.read_text()) if struck.exists() else {"seconds": ended, "newest": -1}
    outputs = [(folder / f"said-{rank}").read_text(errors="replace") for rank in range(RANKS)]
    return Ended(
        codes, outputs, ended - report["seconds"] if struck.exists() else None, report["newest"], _left_behind()
    )


def _limit(name: str) -> float:
    return LIMIT_SECONDS_WITH_SERVERS if name in CONFIGURATIONS else LIMIT_SECONDS


def _left_behind() -> list[str]:
    """Kill processes that still run some seconds after the ranks, and return their command lines."""
    deadline = time.monotonic() + LEFT_WITHIN_SECONDS
    while (left := _children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    names = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            names.append(" ".join(process.cmdline()))
            process.kill()
    return names


def _children() -> list[psutil.Process]:
    """Return the running descendants. Ended processes are reaped."""
    living = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
            elif "resource_tracker" not in " ".join(child.cmdline()):
                living.append(child)
    return living


def judge(name: str, fault: Fault, ended: Ended, directory: Path) -> str:
    """Return the problem of a run with a fault, or "" if there is no problem."""
    if ended.seconds is None:
        return "" if not any(ended.codes) else f"ended with {ended.codes} before its fault"
    most = WITHIN_SECONDS + (_limit(name) if fault.kind == "hang" else 0.0)
    if None in ended.codes:
        return f"rank {ended.codes.index(None)} hangs"
    if lost := _lost(ended, directory):
        return lost
    if ended.left:
        return f"leaves processes running: {ended.left}"
    if any(ended.codes) or fault.kind == "kill":
        if ended.seconds > most:
            return f"ends after {ended.seconds:.0f} s"
        return _judge_messages(fault, ended)
    everything = "".join(ended.outputs)
    if fault.kind == "raise" and FAULT_MESSAGE not in everything:
        return "continued without a message about the error"
    return ""


def _judge_messages(fault: Fault, ended: Ended) -> str:
    """Return the problem with the exit codes and messages of the ranks, or "". No message is required from a rank that
    ended before the fault."""
    if fault.kind == "nap":
        return f"ended with {ended.codes} after a sleep of {NAP_SECONDS:g} s"
    killed = {fault.rank} if fault.kind == "kill" else set[int]()
    expected_ranks = [r for r in range(RANKS) if r not in killed and (ended.codes[r] or r == fault.rank)]
    codes = {ended.codes[rank] for rank in expected_ranks}
    if fault.kind.startswith("full"):
        codes -= {USER_ERROR}  # the exit code if the check of the run directory fails at the start
    of_rank = f" on rank {fault.rank}" if fault.rank else "( on rank 0)?"
    match fault.kind:
        case "stop" if (
            ended.codes[fault.rank] == -signal.SIGTERM
        ):  # the signal arrived before the run handles signals on all ranks
            expected_ranks.remove(fault.rank)
            codes, code, pattern = {ended.codes[rank] for rank in expected_ranks}, 1, "ended without a message"
        case "stop":
            code, pattern = REQUEUE, ""  # no message is required
        case "kill":
            code, pattern = 1, rf"error on rank {fault.rank}: process \d+ on \S+ ended without a message"
        case "hang":
            code, pattern = HANG, r"error( on rank \d+)?: phase \w+ has lasted for"
        case "raise":
            code, pattern = 1, rf"error{of_rank}: .*{FAULT_MESSAGE}"
        case _:
            code, pattern = (
                1,
                rf"error({of_rank})?: .*No space left on device",
            )  # no rank is named if all ranks have the same error
    if codes - {code} or any(ended.codes[rank] != -signal.SIGKILL for rank in killed):
        return f"ended with {ended.codes}"
    silent = [rank for rank in expected_ranks if not re.search(pattern, ended.outputs[rank])]
    return f"rank {silent[0]} reports: {_last_error(ended.outputs[silent[0]])}" if silent else ""


def _last_error(outputs: str) -> str:
    errors = [line for line in outputs.splitlines() if "rror" in line]
    return (errors or outputs.splitlines() or ["nothing"])[-1][:200]


def _lost(ended: Ended, directory: Path) -> str:
    """Return the problem with the newest checkpoint if it is damaged or missing, otherwise ""."""
    markers = finished(directory / "checkpoints")
    newest = max(markers, key=lambda folder: markers[folder].step, default=None)
    if newest is None:
        return "" if ended.newest < 0 else f"the checkpoint of step {ended.newest} is missing"
    if markers[newest].step < ended.newest:
        return f"the checkpoint of step {ended.newest} is missing"
    damaged = problems(newest, markers[newest].files.items())
    return f"{newest.name} is damaged: {damaged}" if damaged else ""


def _is_excluded(point: Point) -> bool:
    """Return whether a point is in the setup of error reporting, before which no rank can report an error, or in the
    thread that limits the time of shutdown."""
    makes = point.collective.startswith("init_process_group") and "megappo/runtime/" in point.function
    return makes or point.thread == "closing"


def draw(points: Sequence[Point], chance: random.Random) -> Point:
    """Draw a point. Each collective has the same probability, and each function after a collective, too."""
    gaps: dict[tuple[str, str], dict[str, list[Point]]] = {}
    for point in points:
        gaps.setdefault((point.collective, point.thread), {}).setdefault(point.function, []).append(point)
    functions = gaps[chance.choice(sorted(gaps))]
    return chance.choice(functions[chance.choice(sorted(functions))])


class Matrix:
    """Fault matrix: runs, their points, and the outcomes of faults."""

    def __init__(self, work: Path, seed: int) -> None:
        self._work, self._seed = work, seed
        self._prepared: dict[str, Path] = {}
        self._points: dict[str, list[list[Point]]] = {}
        self.outcomes: list[Outcome] = []

    @contextlib.contextmanager
    def _prepare(self, name: str) -> Iterator[Path]:
        """Prepare a folder for a run. A resumed run starts with the files of an earlier run."""
        folder = Path(tempfile.mkdtemp(dir=self._work))
        if name == "resumed":
            if name not in self._prepared:
                before = Path(tempfile.mkdtemp(dir=self._work))
                ended = run(name, before, None, "run.steps=2")
                assert ended.codes == [0] * RANKS, ended.outputs
                self._prepared[name] = before / "run"
            shutil.copytree(self._prepared[name], folder / "run")
        yield folder
        shutil.rmtree(folder)

    def points(self, name: str) -> list[list[Point]]:
        """Return the points of a run without a fault, for each rank."""
        if name not in self._points:
            with self._prepare(name) as folder:
                ended = run(name, folder, None)
                assert ended.codes == [0] * RANKS, ended.outputs
                texts = [(folder / f"trace-{rank}").read_text() for rank in range(RANKS)]
            of_ranks = [[Point(*json.loads(line)) for line in text.splitlines()] for text in texts]
            self._points[name] = [[point for point in points if not _is_excluded(point)] for points in of_ranks]
        return self._points[name]

    def try_kind(self, name: str, kind: str, pattern: str, *, each: int) -> None:
        """Run faults of one kind at points whose description contains `pattern`. Print one table row per fault."""
        chance, first = random.Random(f"{self._seed} {name} {kind}"), [*RUNS].index(name) + [*FAULTS].index(kind)
        for turn in range(each):
            rank = (first + turn) % RANKS
            points = [point for point in self.points(name)[rank] if pattern in point.description]
            fault = Fault(kind, rank, draw(points, chance))
            with self._prepare(name) as folder:
                ended = run(name, folder, fault)
                problem = judge(name, fault, ended, folder / "run")
            self.outcomes.append(Outcome(name, fault, problem, ended))
            print(self.outcomes[-1].line, flush=True)

    def run_repeatedly(self, name: str, faults: int) -> str:
        """Run with a sequence of `faults` faults, and resume after each fault. Return the difference from a run
        without faults, or "" if there is none."""
        chance, settings = random.Random(f"{self._seed} {name}"), (f"run.steps={_STEPS_OF_EACH * faults}",)
        last = [max(p.ever for p in points if p.thread == "MainThread") for points in self.points(name)]
        whole, folder = (Path(tempfile.mkdtemp(dir=self._work)) for _ in range(2))
        assert run(name, whole, None, *settings).codes == [0] * RANKS
        done = 0
        while done < faults:
            # A stop saves the requests in flight, which changes the further run. `flying` therefore has no stop faults.
            kinds = [kind for kind in _ENDING if (name, kind) != ("flying", "stop")]
            rank, kind = chance.randrange(RANKS), chance.choice(kinds)
            thread, most = chance.choice([("MainThread", last[rank])] * 4 + [("checkpoint", _OF_A_CHECKPOINT)])
            fault = Fault(kind, rank, Point(thread, 0, "", 0, ever=chance.randrange(most) + 1))
            for leftover in ("struck", *(f"said-{rank}" for rank in range(RANKS))):
                (folder / leftover).unlink(missing_ok=True)
            ended = run(name, folder, fault, *settings)
            self.outcomes.append(Outcome(name, fault, judge(name, fault, ended, folder / "run"), ended))
            print(self.outcomes[-1].line, flush=True)
            done += ended.seconds is not None
            if not any(ended.codes):
                return f"ended after {done} of {faults} faults"
        ended = run(name, folder, None, *settings)
        if ended.codes != [0] * RANKS:
            return f"ended with {ended.codes}: {ended.outputs}"
        try:
            assert_same_run(whole / "run", folder / "run", _STEPS_OF_EACH * faults)
        except AssertionError as error:
            return f"differs: {error or 'other metrics'}"
        return ""


class Outcome(NamedTuple):
    """Fault and its outcome."""

    run: str
    fault: Fault
    problem: str
    """Problem of the run, or "" if there is no problem."""
    ended: Ended

    @property
    def line(self) -> str:
        """Row of the table. If there is a problem, the last output lines of all ranks follow."""
        took = "not reached" if self.ended.seconds is None else f"{self.ended.seconds:.1f} s"
        cells = [self.run, f"{self.fault.kind} on rank {self.fault.rank}", self.fault.point.description, took,
                 " ".join(map(str, self.ended.codes)), self.problem or "good"]  # fmt: skip
        output_lines = [
            f"  {rank}: {line}" for rank, text in enumerate(self.ended.outputs) for line in text.splitlines()[-_SHOWN:]
        ]
        return "\n".join([" | ".join(cells), *(output_lines if self.problem else ())])


def note(outcomes: Sequence[Outcome], seed: int) -> None:
    """Record the outcomes with the commit and the date."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    of_kinds: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        if outcome.ended.seconds is not None:
            of_kind = of_kinds.setdefault(outcome.fault.kind, {"faults": 0, "ended": 0, "seconds": 0.0})
            of_kind["faults"] += 1
            if any(outcome.ended.codes):
                of_kind["ended"] += 1
                of_kind["seconds"] = max(of_kind["seconds"], round(outcome.ended.seconds, 1))
    record = {"commit": commit, "date": str(datetime.now(UTC).date()), "seed": seed, "kinds": of_kinds}
    NOTED.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS), help=f"any of {', '.join(RUNS)}")
    parser.add_argument(
        "--kinds", default=",".join(FAULTS), help=f"any of {', '.join(FAULTS)}; KIND@WORDS selects points with WORDS"
    )
    parser.add_argument("--each", type=int, default=3, help="number of points for each run and kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--again", type=int, default=0, help="number of faults of each run, which is resumed after each fault"
    )
    parser.add_argument("--note", action="store_true", help="write the results to faults.json")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(
        _SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # descendants of ended ranks become children of this process
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONWARNINGS="ignore")
    begun, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        matrix = Matrix(Path(folder), arguments.seed)
        for name in arguments.runs.split(","):
            counts = [
                f"{len({p.description for p in points})} points after {len({(p.collective, p.thread) for p in points})}"
                for points in matrix.points(name)
            ]
            print(f"{name}: {' and '.join(counts)} collectives", flush=True)
            if arguments.again:
                differs = matrix.run_repeatedly(name, arguments.again)
                wrong += bool(differs)
                print(
                    f"{name}, after {arguments.again} faults: {differs or 'bitwise equal to a run without faults'}",
                    flush=True,
                )
                continue
            for kind in arguments.kinds.split(","):
                matrix.try_kind(name, *kind.partition("@")[::2], each=arguments.each)
    reached = [outcome for outcome in matrix.outcomes if outcome.ended.seconds is not None]
    wrong += sum(bool(outcome.problem) for outcome in matrix.outcomes)
    seconds = time.monotonic() - begun
    print(f"{len(reached)} of {len(matrix.outcomes)} faults were reached, {wrong} runs were wrong, {seconds:.0f} s")
    if arguments.note and not wrong:
        note(matrix.outcomes, arguments.seed)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
