"""Custom reward server over HTTP: `reward.function: megappo.rewards.http:scores` with `reward.batch: true`.

Each sample is a POST of a JSON object with `prompt`, `response`, `answer`, `metadata`, `conversation` and `truncated`.
The server answers with `{"score": NUMBER}`. Many requests run at the same time. A sample without an answer at its
deadline fails, and other samples are not affected. The deadline includes retries.
"""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from megappo.errors import one_line, reason, redacted, shortened, whole_number
from megappo.network.http_client import fetch, proxy_of
from megappo.observe.json_values import JSONValue
from megappo.plugins import failure_text
from megappo.runtime.keys import key_of
from megappo.runtime.retrying import LONGEST_PAUSE_SECONDS, TRANSIENT, Tries, requested_pause

_REASON_CHARACTERS, _END_BYTES = 500, 40
_BODY_CHARACTERS, _BODY_BYTES = 200, 4096
_SERVERS = "the reward server's"

T = TypeVar("T")
A = TypeVar("A")


class Unscored(str):
    """Reason for a missing score of a sample, in place of the score."""


@dataclass(frozen=True)
class ServerPlace:
    """Address and key of a server of rewards."""

    url: str
    model: str
    """Name of the model in requests."""
    key: str = field(repr=False)
    starting_seconds: float | None = None
    """Seconds in which a server of the run may refuse connections during its start. None: an external server."""


def scores(
    *,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
    metadata: Sequence[Mapping[str, JSONValue]],
    conversations: Sequence[JSONValue],
    truncated: Sequence[bool],
    url: str,
    headers: Mapping[str, str] | None = None,
    key: str | None = None,
    headers_from_environment: Mapping[str, str] | None = None,
    deadline_seconds: float = 9.0,
    concurrent: int = 64,
) -> list[float | str]:
    """Return the server's score of each sample, or the reason of a failure in its place.

    `key` is the environment variable of the server's key, which is sent as a bearer token. `headers_from_environment`
    maps names of headers to the environment variables of their values. Raises the errors of `secret_headers`.
    """
    all_headers = {**(headers or {}), **secret_headers(key, headers_from_environment)}
    columns: dict[str, Sequence[JSONValue]] = {
        "prompt": prompts, "response": responses, "answer": answers, "metadata": metadata,
        "conversation": conversations, "truncated": truncated,
    }  # fmt: skip
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def score(sample: dict[str, JSONValue]) -> float | str:
        return post(url, sample, _score_of, headers=all_headers, deadline_seconds=deadline_seconds)

    return each(score, samples, concurrent)


def _score_of(answer: JSONValue) -> float:
    """Return the score in an answer of a reward server. Raises the errors of `read` in `post`."""
    score = answer.get("score") if isinstance(answer, dict) else None
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise_reported_error(answer)
        raise ValueError(f"answered {shortened(redacted(json.dumps(answer)))}, must have a number as score")
    return score


def raise_reported_error(answer: JSONValue) -> None:
    """Raise for an answer of status 200 that reports an error.

    Raises ValueError for status codes of requests that must not be retried. Raises ConnectionError otherwise, and
    `post` then retries the request.
    """
    if not isinstance(answer, dict):
        return
    error = answer if answer.get("object") == "error" else answer.get("error") or answer.get("errors")
    if not error:
        return
    code = error.get("code") if isinstance(error, dict) else answer.get("code")
    status = whole_number(str(code)) or 0
    message = error.get("message") if isinstance(error, dict) else error
    shown = shortened(one_line(message if isinstance(message, str) else json.dumps(error)), _BODY_CHARACTERS)
    if 400 <= status < 500 and status not in TRANSIENT:
        raise ValueError(f"answered with error {status}: {shown}")
    raise ConnectionError(f"an answer with an error: {shown}")


def each(work: Callable[[T], float | str], items: Iterable[T], concurrent: int) -> list[float | str]:
    """Return the result of `work` for each item, or the text of its error. At most `concurrent` items run at a time."""

    def attempt(item: T) -> float | str:
        try:
            return work(item)
        except (ValueError, OSError) as error:
            return Unscored(reason(error, _REASON_CHARACTERS))
        except Exception as error:  # noqa: BLE001 - any server answer or sample content fails only this sample
            return Unscored(failure_text(error, _REASON_CHARACTERS))

    with ThreadPoolExecutor(concurrent) as pool:
        return list(pool.map(attempt, items))


def key_in(variable: str | None, whose: str) -> str:
    """Return the key in an environment variable (`key_of`), or "" for None. Raises ValueError for an empty variable."""
    key = key_of(variable) if variable is not None else ""
    if variable is not None and not key:
        is_name = variable.isupper()  # otherwise the setting may be the key itself, which must not be shown
        named, file = (variable, f"{variable}_FILE") if is_name else ("that is named", "NAME_FILE")
        raise ValueError(
            f"{whose} key is to be in the environment variable {named}, which is empty; export it, or set {file} to "
            "the path of a file with the key"
        )
    return key


def secret_headers(
    key: str | None = None, headers_from_environment: Mapping[str, str] | None = None, **_others: JSONValue
) -> dict[str, str]:
    """Return HTTP headers for a reward server from environment variables. Raises ValueError for an empty variable."""
    headers = {"Authorization": f"Bearer {key_in(key, _SERVERS)}"} if key is not None else {}
    return headers | {name: key_in(variable, _SERVERS) for name, variable in (headers_from_environment or {}).items()}


def post(
    url: str,
    content: JSONValue,
    read: Callable[[JSONValue], A],
    *,
    headers: Mapping[str, str],
    deadline_seconds: float,
    most_tries: float = math.inf,
    absent_seconds: float = 0.0,
) -> A:
    """Return the result of `read` for the JSON answer of a server. The request is retried until the deadline or
    `most_tries`; see `Tries`.

    `read` raises ConnectionError if the request should be retried, and ValueError for any other unusable answer.
    `raise_reported_error` raises both for answers that report an error. `absent_seconds`: start-up time of a server
    that the run starts. Such a server is reached without a proxy. While it refuses connections, this time passes
    before the deadline and the tries count.

    Raises OSError if the server does not answer before the deadline or refuses the request; the message contains the
    first 200 characters of the body. Raises ValueError for content that is not JSON, with the name of the field, and
    for an answer that is not JSON. An incomplete answer is retried.
    """
    tries, body = Tries(deadline_seconds, most_tries), _encoded(content)
    start_deadline: float | None = None
    answered = ""
    while True:
        retry_after_seconds = 0.0
        request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
        try:
            answer = fetch(request, timeout_seconds=tries.seconds_left, own=absent_seconds > 0)
            return read(_parsed(answer))
        except ValueError as error:
            raise ValueError(f"{_place(url)}: {error}") from error
        except urllib.error.HTTPError as error:
            body_shown = body_of(error)
            problem = f"HTTP {error.code} {error.reason}{body_shown and f': {body_shown}'}"
            if error.code not in TRANSIENT:
                raise OSError(f"{_place(url)}: {problem}{_elsewhere(error)}") from error
            retry_after_seconds, answered = requested_pause(error.headers), problem
        except (OSError, http.client.HTTPException) as error:  # refused, broken connection, or timeout
            cause = getattr(error, "reason", error)
            problem = str(cause) or type(error).__name__
            if isinstance(cause, TimeoutError):  # the remaining time of this try may have been too short
                problem = f"{answered}, then {problem}" if answered else problem
            else:
                answered = problem
            if isinstance(cause, ConnectionRefusedError):
                start_deadline = start_deadline or time.monotonic() + absent_seconds
                if time.monotonic() < start_deadline:
                    tries.begin_again(LONGEST_PAUSE_SECONDS + deadline_seconds)
            else:
                start_deadline = None
        pause_seconds = tries.pause(retry_after_seconds)
        if pause_seconds is None:
            raise OSError(f"{_place(url)}: {problem}, after {tries.count} {'try' if tries.count == 1 else 'tries'}")
        threading.Event().wait(pause_seconds)


def body_of(error: urllib.error.HTTPError) -> str:
    """Return the first 200 characters of the body of a refused request, as a single line without secrets.

    The result is "" if the body is empty or cannot be read. The function closes the response.
    """
    try:
        with error:
            body = error.read(_BODY_BYTES)
    except (OSError, http.client.HTTPException):
        return ""
    return shortened(one_line(body.decode(errors="replace")), _BODY_CHARACTERS)


def _encoded(content: JSONValue) -> bytes:
    """Return the JSON of the content. Raises ValueError with the name of a field that JSON does not support."""
    try:
        return json.dumps(content, allow_nan=False).encode()
    except (TypeError, ValueError):
        name, value = next(_without_json(content, ""), ("the content", content))
        raise ValueError(
            f"{name} is {shortened(one_line(repr(value)))} ({type(value).__name__}), which JSON does not support; "
            "convert the value to a number or a text in the data"
        ) from None


def _without_json(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield names and values of the parts of `value` that JSON does not support."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str | int | float | None):
                yield f"a key of {name or 'the content'}", key
            yield from _without_json(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _without_json(part, f"{name}[{index}]")
    elif not (value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))):
        yield name, value


def _parsed(answer: bytes) -> JSONValue:
    """Return the JSON of an answer. Raises ConnectionError for a possible beginning of JSON, otherwise ValueError."""
    if not answer:  # the connection broke off and the server sent no length
        raise ConnectionError("an empty answer")
    try:
        return json.loads(answer)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        if answer.lstrip()[:1] in (b"{", b"[", b'"'):
            raise ConnectionError(f"an incomplete answer: ...{_shown(answer[-_END_BYTES:])}") from error
        raise ValueError(f"not JSON: {_shown(answer[:_END_BYTES])}") from error
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _shown(answer: bytes) -> str:
    return one_line(answer.decode(errors="replace"))


def _place(url: str) -> str:
    """Return the name of a server in errors, with the proxy of the request."""
    proxy = proxy_of(url)
    return f"{url} through the environment's proxy {proxy}" if proxy else url


def _elsewhere(error: urllib.error.HTTPError) -> str:
    target = error.headers.get("Location") if error.headers else None
    return f" to {shortened(one_line(target))}, which is not followed; set the address to it" if target else ""
