"""A reward worker: `python -m megappo.rewards.worker_main FD`, started by `workers.RewardPool`.

Receives (function name, options, batch) once, answers ("ready", None) or ("broken", reason), then receives lists of
requests and answers each request in order with (score, None) or (None, reason); a batch function answers the list at
once. Ends with its parent.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megappo.rewards.registry import resolve

_PR_SET_PDEATHSIG = 1

Answer = tuple[float | None, str | None]


def _number(value: Any) -> Answer:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        if not isinstance(value, bool):
            return None, f"returned {value!r}, must be a number"
        return float(value), None
    number = float(value)
    return (number, None) if math.isfinite(number) else (None, f"returned {number}, must be finite")


def _score(function: Callable[..., Any], request: dict[str, Any], options: dict[str, Any]) -> Answer:
    try:
        return _number(function(**request, **options))
    except Exception as error:  # noqa: BLE001 - whatever a user's function raises is a failed sample, not a crash
        return None, f"{type(error).__name__}: {error}"


def _score_batch(function: Callable[..., Any], requests: list[dict[str, Any]], options: dict[str, Any]) -> list[Answer]:
    names = {"prompt": "prompts", "response": "responses", "answer": "answers", "metadata": "metadata"}
    columns = {plural: [r[name] for r in requests] for name, plural in names.items()}
    try:
        values = list(function(**columns, **options))
    except Exception as error:  # noqa: BLE001 - as above
        return [(None, f"{type(error).__name__}: {error}")] * len(requests)
    if len(values) != len(requests):
        return [(None, f"returned {len(values)} scores for {len(requests)} samples")] * len(requests)
    return [_number(v) for v in values]


def main() -> None:
    """Serve until the parent closes the pipe."""
    if sys.platform == "linux":
        # A function that hangs would never notice the closed pipe.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    connection = Connection(int(sys.argv[1]))
    os.dup2(2, 1)  # what a function prints must not end up in the parent's output
    name, options, batch = connection.recv()
    try:
        function = resolve(name)
    except ValueError as error:
        connection.send(("broken", str(error)))
        return
    connection.send(("ready", None))
    while True:
        try:
            requests = connection.recv()
        except EOFError:
            return
        if batch:
            for answer in _score_batch(function, requests, options):
                connection.send(answer)
            continue
        for request in requests:
            connection.send(_score(function, request, options))


if __name__ == "__main__":
    main()
