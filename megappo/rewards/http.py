"""A reward server of your own, over HTTP: `reward.function: megappo.rewards.http:scores` with `reward.batch: true`.

Each sample is a POST of a JSON object with `prompt`, `response`, `answer`, `metadata`, `conversation` and `truncated`,
to which the server answers with `{"score": NUMBER}`. Many are asked at the same time; one that has no answer within its
deadline, tries included, costs its own sample.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_SHOWN_CHARACTERS = 200
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""HTTP's codes after which another try may help."""

T = TypeVar("T")


class Unscored(str):
    """Why a sample has no score, in its place."""


@dataclass(frozen=True)
class ServerPlace:
    """Where a server listens that gives rewards."""

    url: str
    model: str
    """The name by which it knows its model."""
    key: str
    starting_seconds: float | None = None
    """How long nobody may listen at a server of the run's own, which is being started; None: it is somebody else's."""


def scores(
    *,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
    metadata: Sequence[dict[str, Any]],
    conversations: Sequence[Any],
    truncated: Sequence[bool],
    url: str,
    headers: Mapping[str, str] | None = None,
    deadline_seconds: float = 9.0,
    concurrent: int = 64,
) -> list[float | str]:
    """The server's score of each sample, or in its place what went wrong."""
    columns = {
        "prompt": prompts, "response": responses, "answer": answers, "metadata": metadata,
        "conversation": conversations, "truncated": truncated,
    }  # fmt: skip
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def score(sample: dict[str, Any]) -> float | str:
        answer = post(url, sample, headers=headers or {}, deadline_seconds=deadline_seconds)
        found = answer.get("score") if isinstance(answer, dict) else None
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ValueError(f"{url} answered {json.dumps(answer)[:_SHOWN_CHARACTERS]}, must have a number as score")
        return found

    return each(score, samples, concurrent)


def each(work: Callable[[T], float | str], items: Iterable[T], concurrent: int) -> list[float | str]:
    """What the work gives for each item, or the words of what it raised; so many at a time."""

    def attempt(item: T) -> float | str:
        try:
            return work(item)
        except (ValueError, OSError) as error:
            return Unscored(str(error)[:_SHOWN_CHARACTERS])

    with ThreadPoolExecutor(concurrent) as pool:
        return list(pool.map(attempt, items))


def key_in(variable: str | None, whose: str) -> str:
    """The key in an environment variable, "" for None. Raises ValueError where it is empty."""
    key = os.environ.get(variable, "") if variable is not None else ""
    if variable is not None and not key:
        raise ValueError(f"{whose} key is to be in the environment variable {variable}, which is empty; export it")
    return key


def post(
    url: str,
    content: Any,
    *,
    headers: Mapping[str, str],
    deadline_seconds: float,
    most_tries: float = math.inf,
    absent_seconds: float = 0.0,
) -> Any:
    """The JSON that a server answers, tried again, with pauses that double, until the deadline or so many times.

    Where nobody listens, `absent_seconds` pass before time and tries count: the server is being started. Raises OSError
    where there is no answer by then or the server refuses, ValueError for what is not JSON.
    """
    deadline, pause_seconds = time.monotonic() + deadline_seconds, _FIRST_PAUSE_SECONDS
    back_by: float | None = None
    body, tries = json.dumps(content).encode(), 0
    while True:
        tries += 1
        request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=max(0.01, deadline - time.monotonic())) as answer:
                if not (text := answer.read()):  # it broke off where the server told no length
                    raise ConnectionError("an empty answer")
                return json.loads(text)
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code} {error.reason}"
            if error.code not in _TRANSIENT:
                raise OSError(f"{url}: {problem}") from error
        except (OSError, http.client.HTTPException) as error:  # nobody listens, the connection broke, or time is up
            reason = getattr(error, "reason", error)
            problem = str(reason) or type(error).__name__
            if isinstance(reason, ConnectionRefusedError):
                back_by = back_by or time.monotonic() + absent_seconds
                if time.monotonic() < back_by:
                    deadline, tries = time.monotonic() + _LONGEST_PAUSE_SECONDS + deadline_seconds, 0
            else:
                back_by = None
        if tries >= most_tries or time.monotonic() + pause_seconds >= deadline:
            raise OSError(f"{url}: {problem}, after {tries} {'try' if tries == 1 else 'tries'}")
        threading.Event().wait(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
