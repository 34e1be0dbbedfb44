"""Runs with one fault on one rank, at a point between two collectives: does every rank end in seconds with the cause's
sentence, or go on where it should, and is the newest checkpoint whole?

Usage: python -m tests.house.faults [--runs RUN,...] [--kinds KIND[@WORDS],...] [--each N] [--seed N] [--note]
       python -m tests.house.faults --again N [--runs RUN,...] [--seed N]

Each run is traced once, without a fault. Of the points that are found, those that differ in the function and in the
collective before it, `--each` are drawn for each run and kind of fault by the seed, rarely passed ones as often as
others, and the ranks take turns. Exit code 1 where a run hangs, ends without the cause, or loses a checkpoint.

With `--again` each run suffers one fault that ends it after another, anywhere, and goes on after each; it must be the
run that suffered none, to the last bit.
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
from megappo.runtime.store import free_port
from tests.support import nursery  # noqa: F401 - imports what a run imports, once for all
from tests.support.attempts import assert_same_run
from tests.support.places import ROOT
from tests.support.striking import FAULTS, NAP_SECONDS, WORDS, Fault, Point, strike, trace

RANKS = 2
WITHIN_SECONDS = 10.0
LIMIT_SECONDS, LIMIT_SECONDS_WITH_SERVERS = 6.0, 90.0
"""Of every phase, where a rank hangs; one of them waits for the servers' start."""
STARTS_WITHIN_SECONDS = 180.0
"""With servers."""
LEFT_WITHIN_SECONDS = 5.0
NOTED = ROOT / "tests" / "house" / "faults.json"
"""What was tried when everything held last."""
_SHOWN = 12
_ENDING = ("raise", "full", "kill", "stop")
_STEPS_OF_EACH = 2
"""More than a run does on average until a fault ends it."""
_OF_A_CHECKPOINT = 150
"""Functions of two that are written."""
_SET_CHILD_SUBREAPER = 36
_SMALL = (
    "run.steps=2", "rollout.prompts_per_step=4", "actor.minibatch_sequences=16", "critic.minibatch_sequences=16",
    "data.validation.limit=4", "logging.tensorboard=false", "checkpoint.every_steps=1", "evaluation.every_steps=1",
)  # fmt: skip
_EPISODES = (
    "rollout.environment={name: tests.examples.lookup:Lookup, max_turns: 2, max_turn_tokens: 3}",
    "reward.function=environment", "rollout.max_response_tokens=9", "data.max_prompt_tokens=4",
    "data.train={source: 'tests.examples.lookup:keys', options: {held_out: false}}",
    "data.validation={source: 'tests.examples.lookup:keys', limit: 4, options: {held_out: true}}",
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
"""The actor on TP2 and the critic on PP2; data parallel; two turns and a tool; those one step ahead; prompts always in
flight; a run that goes on after its second step; SGLang beside the ranks on a shared device; SGLang on its own, always
answering. Checkpoints are asynchronous but in the first."""
CONFIGURATIONS = {"servers": "sglang_quickstart", "servers in flight": "sglang_disaggregated"}
"""Of those that are not the quickstart."""


class Ended(NamedTuple):
    """How the ranks of a run ended."""

    codes: list[int | None]
    """None: not at all."""
    said: list[str]
    seconds: float | None
    """From the fault to the end of the last rank; None where the point was not reached."""
    newest: int
    """The checkpoint that there was at the fault."""
    left: list[str]
    """Processes that the ranks left behind."""


def rank_main(rank: int, port: int, words: Sequence[str], folder: Path, fault: Fault | None) -> None:
    """One rank."""
    said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if fault is None:
        trace(folder / f"trace-{rank}")
    elif fault.rank == rank:
        strike(fault, folder / "run", folder / "struck")
    sys.exit(megappo(list(words)))


def run(name: str, folder: Path, fault: Fault | None, *more: str) -> Ended:
    """A run in a folder, to its end or until it is later than it may be."""
    hangs = fault is not None and fault.kind == "hang"
    limits = [f"runtime.phase_timeout_seconds={_limit(name):g}"] if hangs else []
    words = [
        "train",
        f"configs/{CONFIGURATIONS.get(name, 'quickstart')}.yaml",
        f"run.directory={folder / 'run'}",
        *_SMALL,
        *RUNS[name],
        *limits,
        *more,
    ]
    context, port = multiprocessing.get_context("fork"), free_port("127.0.0.1")
    ranks = [context.Process(target=rank_main, args=(r, port, words, folder, fault)) for r in range(RANKS)]
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
    told: dict[str, Any] = json.loads(struck.read_text()) if struck.exists() else {"seconds": ended, "newest": -1}
    said = [(folder / f"said-{rank}").read_text(errors="replace") for rank in range(RANKS)]
    return Ended(codes, said, ended - told["seconds"] if struck.exists() else None, told["newest"], _left_behind())


def _limit(name: str) -> float:
    return LIMIT_SECONDS_WITH_SERVERS if name in CONFIGURATIONS else LIMIT_SECONDS


def _left_behind() -> list[str]:
    """What the ranks started and is there yet some seconds later; it is ended."""
    deadline = time.monotonic() + LEFT_WITHIN_SECONDS
    while (left := _children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
            process.kill()
    return found


def _children() -> list[psutil.Process]:
    """Living ones; those that have ended are waited for."""
    living = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
            elif "resource_tracker" not in " ".join(child.cmdline()):
                living.append(child)
    return living


def judge(name: str, fault: Fault, ended: Ended, directory: Path) -> str:
    """What is wrong with an end of a run, "" where nothing is."""
    if ended.seconds is None:
        return "" if not any(ended.codes) else f"ended with {ended.codes} before its fault"
    most = WITHIN_SECONDS + (_limit(name) if fault.kind == "hang" else 0.0)
    if None in ended.codes:
        return f"rank {ended.codes.index(None)} hangs"
    if lost := _lost(ended, directory):
        return lost
    if ended.left:
        return f"leaves behind: {ended.left}"
    if any(ended.codes) or fault.kind == "kill":
        if ended.seconds > most:
            return f"ends after {ended.seconds:.0f} s"
        return _judge_words(fault, ended)
    everything = "".join(ended.said)
    if fault.kind == "raise" and WORDS not in everything:
        return "went on without a word of the error"
    return ""


def _judge_words(fault: Fault, ended: Ended) -> str:
    """What is wrong with how ranks ended; one that was done before another's fault has nothing to say."""
    if fault.kind == "nap":
        return f"ended with {ended.codes} after a sleep of {NAP_SECONDS:g} s"
    killed = {fault.rank} if fault.kind == "kill" else set[int]()
    there = [r for r in range(RANKS) if r not in killed and (ended.codes[r] or r == fault.rank)]
    codes = {ended.codes[rank] for rank in there}
    if fault.kind.startswith("full"):
        codes -= {USER_ERROR}  # where that the run directory can be written is the first thing to be checked
    of_rank = f" on rank {fault.rank}" if fault.rank else "( on rank 0)?"
    match fault.kind:
        case "stop" if ended.codes[fault.rank] == -signal.SIGTERM:  # before the run listens to it, with the others
            there.remove(fault.rank)
            codes, code, wanted = {ended.codes[rank] for rank in there}, 1, "ended without a message"
        case "stop":
            code, wanted = REQUEUE, ""  # which needs no reason
        case "kill":
            code, wanted = 1, rf"error on rank {fault.rank}: process \d+ on \S+ ended without a message"
        case "hang":
            code, wanted = HANG, r"error( on rank \d+)?: phase \w+ has lasted for"
        case "raise":
            code, wanted = 1, rf"error{of_rank}: .*{WORDS}"
        case _:
            code, wanted = 1, rf"error({of_rank})?: .*No space left on device"  # nobody's, where all agreed about it
    if codes - {code} or any(ended.codes[rank] != -signal.SIGKILL for rank in killed):
        return f"ended with {ended.codes}"
    silent = [rank for rank in there if not re.search(wanted, ended.said[rank])]
    return f"rank {silent[0]} says: {_last_error(ended.said[silent[0]])}" if silent else ""


def _last_error(said: str) -> str:
    errors = [line for line in said.splitlines() if "rror" in line]
    return (errors or said.splitlines() or ["nothing"])[-1][:200]


def _lost(ended: Ended, directory: Path) -> str:
    """Whether the newest checkpoint is damaged or gone."""
    markers = finished(directory / "checkpoints")
    newest = max(markers, key=lambda folder: markers[folder].step, default=None)
    if newest is None:
        return "" if ended.newest < 0 else f"the checkpoint of step {ended.newest} is gone"
    if markers[newest].step < ended.newest:
        return f"the checkpoint of step {ended.newest} is gone"
    damaged = problems(newest, markers[newest].files.items())
    return f"{newest.name} is damaged: {damaged}" if damaged else ""


def _is_of_the_way_out(point: Point) -> bool:
    """Whether it is in what makes the way out, without which nobody can be told anything yet, or in what bounds it."""
    makes = point.collective.startswith("init_process_group") and "megappo/runtime/" in point.function
    return makes or point.thread == "closing"


def draw(points: Sequence[Point], chance: random.Random) -> Point:
    """A point: after any collective as likely as after any other, and in any function there."""
    gaps: dict[tuple[str, str], dict[str, list[Point]]] = {}
    for point in points:
        gaps.setdefault((point.collective, point.thread), {}).setdefault(point.function, []).append(point)
    functions = gaps[chance.choice(sorted(gaps))]
    return chance.choice(functions[chance.choice(sorted(functions))])


class Matrix:
    """Runs, their points and what became of their faults."""

    def __init__(self, work: Path, seed: int) -> None:
        self._work, self._seed = work, seed
        self._prepared: dict[str, Path] = {}
        self._points: dict[str, list[list[Point]]] = {}
        self.outcomes: list[Outcome] = []

    @contextlib.contextmanager
    def _begun(self, name: str) -> Iterator[Path]:
        """A folder for a run, in which there is what it goes on with."""
        folder = Path(tempfile.mkdtemp(dir=self._work))
        if name == "resumed":
            if name not in self._prepared:
                before = Path(tempfile.mkdtemp(dir=self._work))
                ended = run(name, before, None, "run.steps=2")
                assert ended.codes == [0] * RANKS, ended.said
                self._prepared[name] = before / "run"
            shutil.copytree(self._prepared[name], folder / "run")
        yield folder
        shutil.rmtree(folder)

    def points(self, name: str) -> list[list[Point]]:
        """What a run without a fault passes, rank by rank."""
        if name not in self._points:
            with self._begun(name) as folder:
                ended = run(name, folder, None)
                assert ended.codes == [0] * RANKS, ended.said
                texts = [(folder / f"trace-{rank}").read_text() for rank in range(RANKS)]
            of_ranks = [[Point(*json.loads(line)) for line in text.splitlines()] for text in texts]
            self._points[name] = [[point for point in points if not _is_of_the_way_out(point)] for points in of_ranks]
        return self._points[name]

    def try_kind(self, name: str, kind: str, wanted: str, *, each: int) -> None:
        """Faults of a kind at points with these words, and a line of the table for each."""
        chance, first = random.Random(f"{self._seed} {name} {kind}"), [*RUNS].index(name) + [*FAULTS].index(kind)
        for turn in range(each):
            rank = (first + turn) % RANKS
            there = [point for point in self.points(name)[rank] if wanted in point.words]
            fault = Fault(kind, rank, draw(there, chance))
            with self._begun(name) as folder:
                ended = run(name, folder, fault)
                problem = judge(name, fault, ended, folder / "run")
            self.outcomes.append(Outcome(name, fault, problem, ended))
            print(self.outcomes[-1].line, flush=True)

    def suffer(self, name: str, faults: int) -> str:
        """One run with that many faults after which it goes on; how it differs from the one without, "" where it does
        not."""
        chance, settings = random.Random(f"{self._seed} {name}"), (f"run.steps={_STEPS_OF_EACH * faults}",)
        last = [max(p.ever for p in points if p.thread == "MainThread") for points in self.points(name)]
        whole, folder = (Path(tempfile.mkdtemp(dir=self._work)) for _ in range(2))
        assert run(name, whole, None, *settings).codes == [0] * RANKS
        done = 0
        while done < faults:
            # What is in flight when a run is asked to stop is kept, and so a stop is part of what such a run is.
            kinds = [kind for kind in _ENDING if (name, kind) != ("flying", "stop")]
            rank, kind = chance.randrange(RANKS), chance.choice(kinds)
            thread, most = chance.choice([("MainThread", last[rank])] * 4 + [("checkpoint", _OF_A_CHECKPOINT)])
            fault = Fault(kind, rank, Point(thread, 0, "", 0, ever=chance.randrange(most) + 1))
            for left in ("struck", *(f"said-{rank}" for rank in range(RANKS))):
                (folder / left).unlink(missing_ok=True)
            ended = run(name, folder, fault, *settings)
            self.outcomes.append(Outcome(name, fault, judge(name, fault, ended, folder / "run"), ended))
            print(self.outcomes[-1].line, flush=True)
            done += ended.seconds is not None
            if not any(ended.codes):
                return f"was done after {done} of {faults} faults"
        ended = run(name, folder, None, *settings)
        if ended.codes != [0] * RANKS:
            return f"ended with {ended.codes}: {ended.said}"
        try:
            assert_same_run(whole / "run", folder / "run", _STEPS_OF_EACH * faults)
        except AssertionError as error:
            return f"is another run: {error or 'of other metrics'}"
        return ""


class Outcome(NamedTuple):
    """A fault and what became of it."""

    run: str
    fault: Fault
    problem: str
    """What is wrong, "" where nothing is."""
    ended: Ended

    @property
    def line(self) -> str:
        """Of the table, with what ranks said at the end where something is wrong."""
        took = "not reached" if self.ended.seconds is None else f"{self.ended.seconds:.1f} s"
        cells = [self.run, f"{self.fault.kind} on rank {self.fault.rank}", self.fault.point.words, took,
                 " ".join(map(str, self.ended.codes)), self.problem or "good"]  # fmt: skip
        said = [
            f"  {rank}: {line}" for rank, text in enumerate(self.ended.said) for line in text.splitlines()[-_SHOWN:]
        ]
        return "\n".join([" | ".join(cells), *(said if self.problem else ())])


def note(outcomes: Sequence[Outcome], seed: int) -> None:
    """Keep what held at this commit today."""
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
    found = {"commit": commit, "date": str(datetime.now(UTC).date()), "seed": seed, "kinds": of_kinds}
    NOTED.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument(
        "--kinds", default=",".join(FAULTS), help=f"of {', '.join(FAULTS)}; KIND@WORDS at points with WORDS"
    )
    parser.add_argument("--each", type=int, default=3, help="points for each run and kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=int, default=0, help="faults of each run after which it goes on")
    parser.add_argument("--note", action="store_true", help="keep what held in faults.json")
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that what ranks leave behind is seen
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONWARNINGS="ignore")
    begun, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        matrix = Matrix(Path(folder), given.seed)
        for name in given.runs.split(","):
            counts = [
                f"{len({p.words for p in points})} points after {len({(p.collective, p.thread) for p in points})}"
                for points in matrix.points(name)
            ]
            print(f"{name}: {' and '.join(counts)} collectives", flush=True)
            if given.again:
                differs = matrix.suffer(name, given.again)
                wrong += bool(differs)
                print(
                    f"{name}, after {given.again} faults: {differs or 'the run without, to the last bit'}", flush=True
                )
                continue
            for kind in given.kinds.split(","):
                matrix.try_kind(name, *kind.partition("@")[::2], each=given.each)
    reached = [outcome for outcome in matrix.outcomes if outcome.ended.seconds is not None]
    wrong += sum(bool(outcome.problem) for outcome in matrix.outcomes)
    seconds = time.monotonic() - begun
    print(f"{len(reached)} faults of {len(matrix.outcomes)} that were tried, {wrong} wrong, in {seconds:.0f} s")
    if given.note and not wrong:
        note(matrix.outcomes, given.seed)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
