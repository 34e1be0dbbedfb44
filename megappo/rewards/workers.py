"""Reward functions in processes of their own, which can be killed: a hanging function costs its sample, not the run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
from torch import Tensor

from megappo.config.schema import RewardSettings

_START_SECONDS = 120.0
_TIMED_OUT = "ran out of time"


class RewardError(RuntimeError):
    """Too many rewards failed, or a worker cannot be started."""


@dataclass(frozen=True)
class RewardRequest:
    """What a reward function gets to see of a sample."""

    prompt: str
    response: str
    answer: str | None
    metadata: dict[str, Any]


@dataclass(frozen=True)
class RewardResult:
    """Scores (B,) float32, and (index, reason) of the samples that got the failure score instead."""

    scores_B: Tensor
    failures: list[tuple[int, str]]

    @property
    def timeouts(self) -> int:
        """Failures that ran out of time."""
        return sum(reason == _TIMED_OUT for _, reason in self.failures)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    pending: deque[int] = field(default_factory=deque)
    """Indices of the requests it works on, in order."""
    deadline: float = 0.0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class RewardPool:
    """Worker processes that apply one reward function; use as a context manager or `close` it."""

    def __init__(self, settings: RewardSettings) -> None:
        """Start the workers. Raises ValueError where the function cannot be found."""
        self._settings = settings
        self._workers: list[_Worker] = []
        try:
            starting = [self._spawn() for _ in range(settings.workers)]
            self._workers = [self._await_ready(w) for w in starting]
        except (ValueError, RewardError):
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def score(self, requests: Sequence[RewardRequest]) -> RewardResult:
        """Score all requests; failures cost only their own sample.

        Raises RewardError where more than `max_failure_fraction` of them failed.
        """
        scores = torch.full((len(requests),), self._settings.failure_score, dtype=torch.float32)
        failures: list[tuple[int, str]] = []
        for number, worker in enumerate(self._workers):
            self._hand_out(worker, range(number, len(requests), len(self._workers)), requests)
        while any(w.pending for w in self._workers):
            for index, score, reason in self._collect(requests):
                if score is None:
                    failures.append((index, str(reason)))
                else:
                    scores[index] = score
        if len(failures) > self._settings.max_failure_fraction * len(requests):
            raise RewardError(
                f"{len(failures)} of {len(requests)} rewards failed, more than reward.max_failure_fraction "
                f"{self._settings.max_failure_fraction}; the first: {failures[0][1]}"
            )
        return RewardResult(scores, sorted(failures))

    def _spawn(self) -> _Worker:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "megappo.rewards.worker_main", str(theirs.fileno())]
        # The parent's import path, so that a function found here is found there.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
        theirs.close()
        return _Worker(process, ours)

    def _await_ready(self, worker: _Worker) -> _Worker:
        settings = self._settings
        worker.connection.send((settings.function, settings.options, settings.batch))
        try:
            if not worker.connection.poll(_START_SECONDS):
                raise RewardError(f"a reward worker did not start within {_START_SECONDS:.0f} s")
            state, reason = worker.connection.recv()
        except EOFError:
            state, reason = "broken", f"reward.function '{settings.function}' ended its worker while being imported"
        except RewardError:
            worker.kill()
            raise
        if state == "broken":
            worker.kill()
            raise ValueError(reason)
        return worker

    def _hand_out(self, worker: _Worker, indices: Sequence[int], requests: Sequence[RewardRequest]) -> None:
        worker.pending = deque(indices)
        if not worker.pending:
            return
        # Shared metadata objects are large only by accident; a request is a few hundred bytes.
        worker.connection.send([asdict(requests[i]) for i in worker.pending])
        self._restart_clock(worker)

    def _restart_clock(self, worker: _Worker) -> None:
        share = len(worker.pending) if self._settings.batch else 1
        worker.deadline = time.monotonic() + self._settings.timeout_seconds * share

    def _collect(self, requests: Sequence[RewardRequest]) -> list[tuple[int, float | None, str | None]]:
        """Answers that are there, or the failure of the worker whose time is up first."""
        busy = [w for w in self._workers if w.pending]
        patience = max(0.0, min(w.deadline for w in busy) - time.monotonic())
        ready = set(wait([w.connection for w in busy], timeout=patience))
        found: list[tuple[int, float | None, str | None]] = []
        for worker in busy:
            if worker.connection in ready:
                found += self._receive(worker, requests)
            elif time.monotonic() >= worker.deadline:
                found += self._replace(worker, requests, _TIMED_OUT)
        return found

    def _receive(
        self, worker: _Worker, requests: Sequence[RewardRequest]
    ) -> list[tuple[int, float | None, str | None]]:
        try:
            score, reason = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            return self._replace(worker, requests, "ended its worker process")
        index = worker.pending.popleft()
        if not self._settings.batch:
            self._restart_clock(worker)
        return [(index, score, reason)]

    def _replace(
        self, worker: _Worker, requests: Sequence[RewardRequest], reason: str
    ) -> list[tuple[int, float | None, str | None]]:
        """Kill a worker; the sample it was at fails, a new worker goes on with the others."""
        worker.kill()
        lost = list(worker.pending) if self._settings.batch else [worker.pending.popleft()]
        remaining = [] if self._settings.batch else list(worker.pending)
        fresh = self._await_ready(self._spawn())
        self._workers[self._workers.index(worker)] = fresh
        self._hand_out(fresh, remaining, requests)
        return [(index, None, reason) for index in lost]
