"""Reward functions in separate processes that can be killed. A hanging function fails only its own sample."""

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
from megappo.errors import RunError
from megappo.models.tokens import Message
from megappo.observe.terminal.progress import PROGRESS
from megappo.plugins import users_code
from megappo.rewards.http import ScoreServer
from megappo.rewards.judge import judge_client, judge_options
from megappo.rewards.processes.channel import ForeignMessageError, PoolEnd
from megappo.rewards.processes.descendants import end_marked
from megappo.rewards.processes.variables import MARK, plain_variables
from megappo.rewards.registry import RewardChoice
from megappo.rewards.rules import RULES
from megappo.runtime.launchers import read_ranks
from megappo.types import CHAT_MESSAGES

_START_SECONDS = 120.0
# Longer than the time in which a supervisor tries to kill adopted processes (`descendants._KILL_SECONDS`).
_END_SECONDS = 15.0
_LOOK_SECONDS = 0.5
_LARGEST_CHUNK, _MOST_WORKERS = 64, 8
TIMED_OUT = "ran out of time"
"""Reason of a failure that exceeded `reward.timeout_seconds`."""
_DIED = "ended its worker process"
_WROTE = "wrote into file descriptors that are not its own"
_SCORES = "scores of this rank"
_TOO_LARGE = "used more than twice reward.worker_memory_gigabytes"


class RewardError(RunError):
    """Error for too many failed rewards, or for a worker that cannot be started."""


@dataclass(frozen=True)
class RewardRequest:
    """Part of a sample that a reward function receives."""

    prompt: str
    response: str
    raw_response: str
    """Response with special tokens."""
    answer: str | None
    metadata: dict[str, Any]
    prompt_token_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    """Token ids after the prompt, including the stop token."""
    truncated: bool = False
    """Whether a limit of the whole response ended the response (`End.is_truncated`)."""
    conversation: Sequence[Message] = ()
    """Messages of the prompt and later messages, each with `role` and `content`. The role is `assistant` for turns of
    the model, and `environment` for texts of an environment."""


@dataclass(frozen=True)
class RewardResult:
    """Scores (B,) float32 on the CPU, and (index, reason) of samples that have the failure score instead."""

    scores: Tensor
    failures: list[tuple[int, str]]
    late: frozenset[int] = frozenset()
    """Indices of failures that timed out."""
    notes: tuple[tuple[int, str], ...] = ()
    """(index, note) of scores with a note that are not failures."""

    @property
    def timeouts(self) -> int:
        """Number of failures that timed out."""
        return len(self.late)


class Worker:
    """Worker process and its supervisor, from start to end."""

    def __init__(
        self,
        choice: Any,
        program: str = "megappo.rewards.processes.worker_main",
        variables: Callable[[Mapping[str, str]], dict[str, str]] = dict,
    ) -> None:
        """Start the worker and its supervisor.

        `choice` is the first message to the worker's program. `variables` selects environment variables of this
        process for the worker.
        """
        self.ready = self.has_scored = False
        self.pending: deque[int] = deque()
        """Indices of the worker's current requests, in order."""
        self.deadline = time.monotonic() + _START_SECONDS
        self.channel = PoolEnd()
        self.pid: int | None = None
        """Id of the process that calls the function, available after its import."""
        self._mark = secrets.token_hex(16)
        descriptors = self.channel.their_descriptors
        command = [sys.executable, "-m", program, *map(str, descriptors)]
        # The worker has the parent's import path, so that the same functions can be imported.
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self.supervisor = subprocess.Popen(
            command,
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env=variables(os.environ) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: self._mark},
            process_group=0,  # Ctrl-C in the terminal must reach only the trainer
        )
        with suppress(OSError):  # the end of a worker is detected when its answer is read
            self.channel.started(choice)

    @property
    def speaks(self) -> bool:
        """Whether a message, or the end of the worker, can be read."""
        return bool(wait([self.channel.answers], timeout=0))

    @property
    def resident_gigabytes(self) -> float:
        """Resident memory of the worker's process in 1e9 bytes, or 0 for a process that has ended."""
        try:
            return float(psutil.Process(self.pid).memory_info().rss) / 1e9
        except psutil.Error:
            return 0.0

    def kill(self) -> None:
        """End the worker with all its descendants, including descendants in separate sessions."""
        self.hang_up()
        self.wait()

    def hang_up(self) -> None:
        """Close the channel, so that the supervisor ends the worker. The method does not wait."""
        self.channel.close()
        self.supervisor.send_signal(signal.SIGCONT)  # a stopped supervisor would not notice the closed channel

    def wait(self) -> None:
        """Wait until the worker and all its descendants have ended, after `hang_up`."""
        try:
            self.supervisor.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            self.supervisor.wait()
        if self.supervisor.returncode != 0:  # a killed supervisor leaves its adopted processes behind
            end_marked(MARK, self._mark)


@dataclass
class _Job:
    """State of a call of `RewardPool.run`."""

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
    """Return the number of worker processes of a rank for a function.

    The default is half of the rank's share of the machine's cores. The share depends on the number of ranks on the
    machine, if the launcher's variables contain this number.
    """
    if settings.workers is not None:
        return settings.workers
    if settings.batch:
        return 1
    cores = len(os.sched_getaffinity(0)) // (read_ranks(environment).local_world_size or 1)
    return min(_MOST_WORKERS, max(1, cores // 2))


class RewardPool(AbstractContextManager["RewardPool"]):
    """Worker processes that apply one reward function. Use the pool as a context manager, or `close` the pool."""

    def __init__(
        self, settings: RewardSettings, server: ScoreServer | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        """Start the workers and wait until each worker has imported the function.

        `server` is a judge's own server. `check` is called regularly and raises errors that end the run.

        Raises ValueError if the function is unusable, and RewardError if a worker ends or hangs during the import.
        """
        if settings.batch and (settings.workers or 1) > 1:
            raise ValueError(f"reward.workers is {settings.workers}, but reward.batch uses one worker; set workers: 1")
        self._settings = settings
        assert settings.function is not None, "a pool has one function"
        self._check, self._look = check, 0.0
        options = settings.options
        if settings.judge is not None:
            options = judge_options(settings.judge, server or judge_client(settings.judge), CHAT_MESSAGES)
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
        """Raise ValueError if workers exceed their memory limit before the first score. Such workers would be replaced
        after each chunk of samples."""
        used, most = max(worker.resident_gigabytes for worker in self.workers), self._settings.worker_memory_gigabytes
        if used > most:
            raise ValueError(
                f"a worker uses {used:.3g} GB after the import of reward.function '{self._settings.function}', above "
                f"reward.worker_memory_gigabytes {most:g}; raise the limit, or import less"
            )

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers at the same time, because a scheduler that stops a run leaves little time."""
        for worker in self.workers:
            worker.hang_up()
        for worker in self.workers:
            worker.wait()
        self.workers = []

    def score(self, requests: Sequence[RewardRequest]) -> RewardResult:
        """Score all requests. A failure affects only its own sample, or all samples of a batch function.

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

        `are_too_many` receives the number of failures, and returns whether the run will end because of the failures.
        If a sample timed out and `are_too_many` returns true, this method does not wait for the remaining samples. The
        remaining samples get `reward.failure_score`.
        """
        assert self.workers, "the pool is closed"
        pickled = [_pickled(index, request) for index, request in enumerate(requests)]
        job = _Job(pickled, deque(range(len(pickled))))
        for worker in [w for w in self.workers if w.ready and (w.speaks or w.supervisor.poll() is not None)]:
            self._replace(worker)  # the worker ended between two calls, so no sample fails
        PROGRESS.expect(_SCORES, len(requests))
        self._show_late(job)
        try:
            while not job.done and not (job.late and are_too_many is not None and are_too_many(len(job.failures))):
                self._hand_out(job)
                self._collect(job)
        finally:
            PROGRESS.drop(_SCORES)
            for worker in [w for w in self.workers if w.pending]:
                self._replace(worker)  # answers of an ended call must not reach the next call
        every = [job.scores.get(index, self._settings.failure_score) for index in range(len(requests))]
        scores = torch.tensor(every, dtype=torch.float32)
        return RewardResult(scores, sorted(job.failures.items()), frozenset(job.late), tuple(sorted(job.notes.items())))

    def _hand_out(self, job: _Job) -> None:
        """Send the next requests to idle workers. Chunks become smaller at the end, so that workers finish together."""
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
        """Wait for answers and record them, or replace a worker whose time limit has passed."""
        busy = [worker for worker in self.workers if worker.pending or not worker.ready]
        assert busy, "no worker has the unanswered requests"
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
        """Replace workers that use too much memory during a call, because the trainer shares the machine's memory."""
        for worker in [w for w in self.workers if w.pending]:
            if worker.resident_gigabytes > 2 * self._settings.worker_memory_gigabytes:
                self._lose(worker, job, _TOO_LARGE)

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

    def _welcome(self, worker: Worker, state: str, detail: int | str) -> None:
        if state == "broken":
            raise ValueError(detail)
        worker.pid, worker.ready = int(detail), True

    def _lose(self, worker: Worker, job: _Job, reason: str) -> None:
        """Replace a worker. Its current sample fails, and its other samples wait for another worker."""
        if not worker.ready:
            raise RewardError(f"reward.function '{self._settings.function}' {reason} during its import; fix the import")
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
        """Replace a worker by a new worker. The other workers continue during the start."""
        worker.kill()
        self.workers[self.workers.index(worker)] = self._worker()

    def _worker(self) -> Worker:
        """Start a worker. The worker of a built-in rule gets no environment variables with secrets, because a rule
        reads text of a model and needs no secret."""
        is_rule = self._settings.function in RULES
        return Worker(self._choice, variables=plain_variables if is_rule else dict)


def too_many_failures(
    settings: RewardSettings, failed: int, total: int, failures: Sequence[tuple[int, str]], *, late: int = 0
) -> RewardError:
    """Return the error that ends a run. `late` is the number of failures that timed out."""
    first = failures[0][1] if failures else "on another rank"
    timed_out = f" ({late} ran out of time, reward.timeout_seconds is {settings.timeout_seconds:g})" if late else ""
    remedy = "raise reward.timeout_seconds, or fix the reward" if late else "fix the reward or its data"
    return RewardError(
        f"{failed} of {total} rewards failed{timed_out}, more than reward.max_failure_fraction "
        f"{settings.max_failure_fraction}; {remedy}; the first: {first}"
    )


def _pickled(index: int, request: RewardRequest) -> bytes:
    problem = f"the metadata of sample {index} cannot be sent to a reward worker"
    with users_code(problem, "use plain values in the metadata"):
        return pickle.dumps(vars(request))
