"""A reward worker: `python -m megappo.rewards.worker_main FD`, started by `workers.RewardPool`.

Receives a RewardChoice once and answers ("ready", None) or ("broken", reason). Then receives lists of pickled requests
(prompt, response, answer, metadata). A per-sample function answers each request in order with (score, None) or
(None, reason), a batch function the whole list at once. Ends with its parent.

Must import nothing heavy: a killed worker is replaced in the time this takes.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from multiprocessing.connection import Connection
from typing import Any

from megappo.rewards.registry import RewardChoice, resolve

_PR_SET_PDEATHSIG = 1
_LARGEST_FLOAT32 = 3.4028234663852886e38
_REASON_CHARACTERS = 300

Answer = tuple[float | None, str | None]


def _number(value: Any) -> Answer:
    """A score that fits float32, or why `value` is none."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None, f"returned {value!r}, must be a number"[:_REASON_CHARACTERS]
    number = float(value)
    if not math.isfinite(number) or abs(number) > _LARGEST_FLOAT32:
        return None, f"returned {number}, must be finite"
    return number, None


def _failure(error: BaseException) -> Answer:
    return None, f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]


def _score(function: Callable[..., Any], pickled: bytes, options: dict[str, Any]) -> Answer:
    try:
        prompt, response, answer, metadata = pickle.loads(pickled)
        return _number(function(prompt=prompt, response=response, answer=answer, metadata=metadata, **options))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - what a user's function raises is a failed sample
        return _failure(error)


def _score_batch(function: Callable[..., Any], pickled: list[bytes], options: dict[str, Any]) -> list[Answer]:
    try:
        prompts, responses, answers, metadata = (list(c) for c in zip(*map(pickle.loads, pickled), strict=True))
        found = function(prompts=prompts, responses=responses, answers=answers, metadata=metadata, **options)
        if isinstance(found, Mapping | Set):  # a list of them would hold keys, or any order
            return [(None, f"returned a {type(found).__name__}, must be a list of numbers")] * len(pickled)
        values = list(found)
        if len(values) != len(pickled):
            return [(None, f"returned {len(values)} scores for {len(pickled)} samples")] * len(pickled)
        return [_number(value) for value in values]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
        return [_failure(error)] * len(pickled)


def _load(choice: RewardChoice) -> tuple[Callable[..., Any] | None, str | None]:
    try:
        return resolve(choice), None
    except ValueError as error:
        return None, str(error)


def _serve(connection: Connection) -> None:
    choice: RewardChoice = connection.recv()
    function, reason = _load(choice)
    connection.send(("ready" if function is not None else "broken", reason))
    process = os.getpid()
    while function is not None:
        pickled: list[bytes] = connection.recv()
        answers: Iterable[Answer | list[Answer]] = (
            [_score_batch(function, pickled, choice.options)]
            if choice.batch
            else (_score(function, request, choice.options) for request in pickled)
        )
        for answer in answers:
            if os.getpid() != process:  # the function forked: a second answer would become the next sample's score
                os._exit(0)
            connection.send(answer)


def _leave_stopping_to_the_parent() -> None:
    """A scheduler and a terminal send their signals to every process of a job; a worker that ended at once would turn
    the samples it has into failures. What the function itself starts can be stopped as usual.
    """
    stopping = (signal.SIGTERM, signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in stopping:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in stopping] and None)


def main() -> None:
    """Serve until the parent closes the pipe."""
    if sys.platform == "linux":
        # A function that hangs would never notice the closed pipe.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _leave_stopping_to_the_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # a function's own children would keep the pipe open
    os.dup2(2, 1)  # what a function prints must not end up in the parent's output
    try:
        _serve(Connection(descriptor))
    except (EOFError, ConnectionError):
        return  # the parent is gone, or has closed the pool


if __name__ == "__main__":
    main()
