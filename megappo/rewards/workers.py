"""Reward functions in processes of their own, which can be killed: a hanging function costs its sample, not the run."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import psutil
import torch
from torch import Tensor

from megappo.config.schema import RewardSettings
from megappo.config.tokens import Message
from megappo.errors import RunError
from megappo.observe.progress import PROGRESS
from megappo.plugins import users_code
from megappo.rewards.channel import ForeignMessageError, PoolEnd
from megappo.rewards.descendants import end_marked
from megappo.rewards.http import ServerPlace
from megappo.rewards.judge import judge_options, judge_place
from megappo.rewards.registry import RewardChoice
from megappo.rewards.rules import RULES
from megappo.rewards.variables import MARK, plain_variables
from megappo.runtime.launchers import read_ranks
from megappo.types import CHAT_MESSAGES

_START_SECONDS = 120.0
# Longer than the seconds for which a supervisor tries to kill what it has adopted (`descendants._KILL_SECONDS`).
_END_SECONDS = 15.0
_LOOK_SECONDS = 0.5
_LARGEST_CHUNK, _MOST_WORKERS = 64, 8
TIMED_OUT = "ran out of time"
"""Reason of a failure that passed `reward.timeout_seconds`."""
_DIED = "ended its worker process"
_WROTE = "wrote into file descriptors that are not its own"
_SCORES = "scores of this rank"
_HELD = "held more than twice reward.worker_memory_gigabytes"


class RewardError(RunError):
    """Too many rewards failed, or a worker cannot be started."""


@dataclass(frozen=True)
class RewardRequest:
    """The part of a sample that a reward function receives."""

    prompt: str
    response: str
    raw_response: str
    """The response with special tokens."""
    answer: str | None
    metadata: dict[str, Any]
    prompt_token_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    """Token ids after the prompt, the stop token included."""
    truncated: bool = False
    """Whether a limit of the whole response ended it, see `End.is_truncated`."""
    conversation: Sequence[Message] = ()
    """Messages of the prompt and those after it, each with `role` and `content`; the role is `assistant` for the
    model's turns, `environment` for what an environment said."""


@dataclass(frozen=True)
class RewardResult:
    """Scores (B,) float32 on the CPU, and (index, reason) of the samples that got the failure score instead."""

    scores: Tensor
    failures: list[tuple[int, str]]
    late: frozenset[int] = frozenset()
    """Indices of failures that timed out."""
    notes: tuple[tuple[int, str], ...] = ()
    """(index, note) of scores with a note that are no failures."""

    @property
    def timeouts(self) -> int:
        """Failures that ran out of time."""
        return len(self.late)


class Worker:
    """One worker process and its supervisor, from their start to their end."""

    def __init__(
        self,
        choice: Any,
        program: str = "megappo.rewards.worker_main",
        variables: Callable[[Mapping[str, str]], dict[str, str]] = dict,
    ) -> None:
        """`choice`: the first message to the worker's program; `variables`: chooses its environment variables from this
        process's."""
        self.ready = self.has_scored = False
        self.pending: deque[int] = deque()
        """Indices of the requests that the worker is working on, in order."""
        self.deadline = time.monotonic() + _START_SECONDS
        self.channel = PoolEnd()
        self.pid: int | None = None
        """Process id of the process that calls the function, once it has imported it."""
        self._mark = secrets.token_hex(16)
        descriptors = self.channel.their_descriptors
        command = [sys.executable, "-m", program, *map(str, descriptors)]
        # The parent's import path, so that a function found here is found there.
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self.supervisor = subprocess.Popen(
            command,
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env=variables(os.environ) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: self._mark},
            process_group=0,  # the terminal's Ctrl-C is for the trainer
        )
        with suppress(OSError):  # that it has ended already is noticed where its answer is read
            self.channel.started(choice)

    @property
    def speaks(self) -> bool:
        """Whether a message, or the end of the worker, waits to be read."""
        return bool(wait([self.channel.answers], timeout=0))

    @property
    def resident_gigabytes(self) -> float:
        """Resident memory of the worker's process, in 1e9 bytes; 0 where it has ended."""
        try:
            return float(psutil.Process(self.pid).memory_info().rss) / 1e9
        except psutil.Error:
            return 0.0

    def kill(self) -> None:
        """End the worker with all its descendants, those in sessions of their own included."""
        self.hang_up()
        self.wait()

    def hang_up(self) -> None:
        """Tell the supervisor to end the worker; waits for nothing."""
        self.channel.close()
        self.supervisor.send_signal(signal.SIGCONT)  # a stopped one would not see that its pool hung up

    def wait(self) -> None:
        """Wait, after `hang_up`, until the worker and all its descendants have ended."""
        try:
            self.supervisor.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            self.supervisor.wait()
        if self.supervisor.returncode != 0:  # it was killed, and what it had adopted is nobody's
            end_marked(MARK, self._mark)


@dataclass
class _Job:
    """One call of `RewardPool.run`."""

    pickled: list[bytes]
    waiting: deque[int]
    """Indices of requests that no worker has."""
    scores: dict[int, float] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    """Indices of failures that timed out."""

    @property
    def done(self) -> bool:
        return len(self.scores) + len(self.failures) == len(self.pickled)

    def record(self, index: int, score: float | None, reason: str | None) -> None:
        PROGRESS.add(_SCORES, 1)
        if score is None:
            self.failures[index] = str(reason)
            return
        self.scores[index] = score
        if reason is not None:
            self.notes[index] = reason


def worker_count(settings: RewardSettings, environment: Mapping[str, str]) -> int:
    """Number of processes that a rank has for a function; by default half of its share of the machine's cores, which is
    divided by the ranks on the machine as far as the launcher's variables say."""
    if settings.workers is not None:
        return settings.workers
    if settings.batch:
        return 1
    cores = len(os.sched_getaffinity(0)) // (read_ranks(environment).local_world_size or 1)
    return min(_MOST_WORKERS, max(1, cores // 2))


class RewardPool(AbstractContextManager["RewardPool"]):
    """Worker processes that apply one reward function; use as a context manager or `close` it."""

    def __init__(
        self, settings: RewardSettings, place: ServerPlace | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        """Start the workers and wait until each has imported the function.

        `place`: of a judge's own server. `check` is called now and then, and raises what ends the run.
        Raises ValueError where the function cannot be used, RewardError where a worker ends or hangs in the import.
        """
        if settings.batch and (settings.workers or 1) > 1:
            raise ValueError(f"reward.workers is {settings.workers}, but reward.batch makes one call; set workers: 1")
        self._settings = settings
        assert settings.function is not None, "a pool has one function"
        self._check, self._look = check, 0.0
        options = settings.options
        if settings.judge is not None:
            options = judge_options(settings.judge, place or judge_place(settings.judge), CHAT_MESSAGES)
        self._choice = RewardChoice(settings.function, options, settings.batch)
        self.workers: list[Worker] = []
        try:
            for _ in range(worker_count(settings, os.environ)):
                self.workers.append(self._worker())
            while not all(worker.ready for worker in self.workers):
                self._collect(_Job([], deque()))
            self._check_memory()
        except (ValueError, RewardError, OSError):
            self.close()
            raise

    def _check_memory(self) -> None:
        """Raise ValueError where workers hold more than they may before they have scored anything, as each would be
        replaced after its first samples."""
        held, most = max(worker.resident_gigabytes for worker in self.workers), self._settings.worker_memory_gigabytes
        if held > most:
            raise ValueError(
                f"a worker holds {held:.3g} GB once it has imported reward.function '{self._settings.function}', more "
                f"than reward.worker_memory_gigabytes {most:g}; raise that, or import less"
            )

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, at the same time: a scheduler that stops a run leaves little."""
        for worker in self.workers:
            worker.hang_up()
        for worker in self.workers:
            worker.wait()
        self.workers = []

    def score(self, requests: Sequence[RewardRequest]) -> RewardResult:
        """Score all requests; failures cost only their own sample (all of them, with a batch function).

        Raises RewardError if more than `max_failure_fraction` of the requests failed.
        """
        most = self._settings.max_failure_fraction * len(requests)
        result = self.run(requests, lambda failed: failed > most)
        if len(result.failures) > most:
            raise too_many_failures(
                self._settings, len(result.failures), len(requests), result.failures, late=result.timeouts
            )
        return result

    def run(self, requests: Sequence[RewardRequest], are_too_many: Callable[[int], bool] | None = None) -> RewardResult:
        """Score all requests.

        `are_too_many` receives the number of failures, and returns whether the run will end because of the failures. If
        a sample timed out and `are_too_many` returns true, this function does not wait for the remaining samples.
        They get `reward.failure_score`.
        """
        assert self.workers, "the pool is closed"
        pickled = [_pickled(index, request) for index, request in enumerate(requests)]
        job = _Job(pickled, deque(range(len(pickled))))
        for worker in [w for w in self.workers if w.ready and (w.speaks or w.supervisor.poll() is not None)]:
            self._replace(worker)  # ended between two calls, by whatever: no sample's fault
        PROGRESS.expect(_SCORES, len(requests))
        self._show_late(job)
        try:
            while not job.done and not (job.late and are_too_many is not None and are_too_many(len(job.failures))):
                self._hand_out(job)
                self._collect(job)
        finally:
            PROGRESS.drop(_SCORES)
            for worker in [w for w in self.workers if w.pending]:
                self._replace(worker)  # the call has ended, and nobody reads its answers
        every = [job.scores.get(index, self._settings.failure_score) for index in range(len(requests))]
        scores = torch.tensor(every, dtype=torch.float32)
        return RewardResult(scores, sorted(job.failures.items()), frozenset(job.late), tuple(sorted(job.notes.items())))

    def _hand_out(self, job: _Job) -> None:
        """Give idle workers their next requests: fewer towards the end, so that they finish together."""
        for worker in [w for w in self.workers if w.ready and not w.pending]:
            if worker.has_scored and worker.resident_gigabytes > self._settings.worker_memory_gigabytes:
                self._replace(worker)
        for worker in [w for w in self.workers if w.ready and not w.pending]:
            if not job.waiting:
                return
            fair = -(-len(job.waiting) // (2 * len(self.workers)))
            count = len(job.waiting) if self._settings.batch else min(fair, _LARGEST_CHUNK)
            worker.pending = deque(job.waiting.popleft() for _ in range(count))
            try:
                worker.channel.send([job.pickled[index] for index in worker.pending])
            except OSError:
                self._lose(worker, job, _DIED)
                continue
            worker.deadline = time.monotonic() + self._settings.call_seconds(count)

    def _collect(self, job: _Job) -> None:
        """Wait for answers and take them, or take the worker whose time is up."""
        busy = [worker for worker in self.workers if worker.pending or not worker.ready]
        assert busy, "unanswered requests, but no worker has them"
        self._check()
        patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        ready = wait([worker.channel.answers for worker in busy], timeout=min(patience, _LOOK_SECONDS))
        for worker in busy:
            if worker.channel.answers in ready:
                self._receive(worker, job)
            elif time.monotonic() >= worker.deadline and not worker.speaks:
                self._lose(worker, job, TIMED_OUT)
        if time.monotonic() >= self._look:
            self._look = time.monotonic() + _LOOK_SECONDS
            self._end_the_large(job)

    def _end_the_large(self, job: _Job) -> None:
        """Replace workers that hold too much memory while they score: the trainer needs the same machine's memory."""
        for worker in [w for w in self.workers if w.pending]:
            if worker.resident_gigabytes > 2 * self._settings.worker_memory_gigabytes:
                self._lose(worker, job, _HELD)

    def _receive(self, worker: Worker, job: _Job) -> None:
        try:
            while (worker.pending or not worker.ready) and (answer := worker.channel.receive()) is not None:
                if not worker.ready:
                    self._welcome(worker, *answer)
                else:
                    job.record(worker.pending.popleft(), *answer)
                    worker.has_scored = True
        except (EOFError, OSError):
            self._lose(worker, job, _DIED)
        except ForeignMessageError:
            self._lose(worker, job, _WROTE)
        else:
            worker.deadline = time.monotonic() + self._settings.timeout_seconds

    def _welcome(self, worker: Worker, state: str, found: int | str) -> None:
        if state == "broken":
            raise ValueError(found)
        worker.pid, worker.ready = int(found), True

    def _lose(self, worker: Worker, job: _Job, reason: str) -> None:
        """Replace a worker; the sample that it was scoring fails, its others wait for another worker."""
        if not worker.ready:
            raise RewardError(f"reward.function '{self._settings.function}' {reason} while it was imported; fix it")
        failed = [*worker.pending] if self._settings.batch else [worker.pending.popleft()] if worker.pending else []
        for index in failed:
            job.record(index, None, reason)
        if reason == TIMED_OUT:
            job.late.update(failed)
            self._show_late(job)
        if not self._settings.batch:
            job.waiting.extendleft(reversed(worker.pending))
        self._replace(worker)

    def _show_late(self, job: _Job) -> None:
        limit = f"reward.timeout_seconds is {self._settings.timeout_seconds:g}"
        PROGRESS.remark(_SCORES, f"{len(job.late)} timed out ({limit})")

    def _replace(self, worker: Worker) -> None:
        """Replace a worker by a new one; the others work on while it starts."""
        worker.kill()
        self.workers[self.workers.index(worker)] = self._worker()

    def _worker(self) -> Worker:
        """A new worker. A built-in rule reads what a model wrote and needs no secret, so its worker gets no environment
        variables with secrets."""
        is_rule = self._settings.function in RULES
        return Worker(self._choice, variables=plain_variables if is_rule else dict)


def too_many_failures(
    settings: RewardSettings, failed: int, total: int, failures: Sequence[tuple[int, str]], *, late: int = 0
) -> RewardError:
    """The error that ends a run. `late`: failures that ran out of time."""
    first = failures[0][1] if failures else "on another rank"
    timed_out = f" ({late} ran out of time, reward.timeout_seconds is {settings.timeout_seconds:g})" if late else ""
    remedy = "raise reward.timeout_seconds, or fix the reward" if late else "fix the reward or its data"
    return RewardError(
        f"{failed} of {total} rewards failed{timed_out}, more than reward.max_failure_fraction "
        f"{settings.max_failure_fraction}; {remedy}; the first: {first}"
    )


def _pickled(index: int, request: RewardRequest) -> bytes:
    problem = f"the metadata of sample {index} cannot be sent to a reward worker"
    with users_code(problem, "keep plain values in them"):
        return pickle.dumps(vars(request))
