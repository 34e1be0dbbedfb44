"""Client of servers of scores, and the custom reward server `reward.function: megappo.rewards.http:scores`.

For a custom server (with `reward.batch: true`), each sample is a POST of a JSON object with `prompt`, `response`,
`answer`, `metadata`, `conversation` and `truncated`. The server answers with `{"score": NUMBER}`. Judges and reward
models on servers send other requests with the same client. Many requests run at the same time. A sample without an
answer at its deadline fails, and other samples are not affected. The deadline includes retries.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from megappo.errors import RunError, one_line, reason, redacted, remember, shortened, whole_number
from megappo.files.json_values import JSONValue
from megappo.network.http_client import fetch, proxy_of
from megappo.network.keys import key_of
from megappo.network.retrying import LONGEST_PAUSE_SECONDS, TRANSIENT, Tries, requested_pause
from megappo.plugins import failure_text
from megappo.rewards.numbers import as_float
from megappo.runtime.waiting import pause

if TYPE_CHECKING:
    from megappo.config.sections.own_server import RequestSettings

_REASON_CHARACTERS, _END_BYTES = 500, 40
_BODY_CHARACTERS, _BODY_BYTES = 200, 4096
_SERVERS = "the reward server's"

T = TypeVar("T")
A = TypeVar("A")


class Unscored(str):
    """Reason for a missing score of a sample, in place of the score."""


def _continue() -> None:
    """Check nothing. The default of `ScoreServer.check`."""


@dataclass(frozen=True)
class ScoreServer:
    """A server of scores: its address, its key and the limits of requests."""

    url: str
    timeout_seconds: float
    """Time limit of a request including retries."""
    concurrency: int
    """Maximum number of requests at a time."""
    key: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    most_tries: float = math.inf
    starting_seconds: float = 0.0
    """Time in which a server of the run may refuse connections during its start. 0: an external server."""
    check: Callable[[], None] = _continue
    """Function that is called before each retry, and raises RunError if the server has failed permanently."""

    @classmethod
    def of(cls, settings: RequestSettings, whose: str) -> ScoreServer:
        """Return the client of the server in settings. `whose`: user of the key, for the ValueError of an empty key."""
        key = key_in(settings.key, whose)
        url, most_tries = (settings.url or "").rstrip("/"), settings.retries + 1
        return cls(url, settings.timeout_seconds, settings.concurrency, key, most_tries=most_tries)

    def each(self, work: Callable[[T], A], items: Iterable[T]) -> list[A | str]:
        """Return the result of `work` for each item, or the reason of its failure (`Unscored`). Raises RunError of
        `check`."""
        remember(self.key)

        def attempt(item: T) -> A | str:
            try:
                return work(item)
            except (ValueError, OSError) as error:
                return Unscored(reason(error, _REASON_CHARACTERS))
            except RunError:
                raise
            except Exception as error:  # noqa: BLE001 - any server answer or sample content fails only this sample
                return Unscored(failure_text(error, _REASON_CHARACTERS))

        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(attempt, items))

    def post(self, path: str, content: JSONValue, read: Callable[[JSONValue], A]) -> A:
        """Return the result of `read` for the JSON answer of the server. The request is retried until the deadline or
        `most_tries`; see `Tries`.

        `read` raises ConnectionError if the request should be retried, and ValueError for any other unusable answer.
        `raise_reported_error` raises both for answers that report an error. A server that the run starts is reached
        without a proxy. While it refuses connections, `starting_seconds` pass before the deadline and the tries count.

        Raises OSError if the server does not answer before the deadline or refuses the request; the message contains
        the first 200 characters of the body. Raises ValueError for content that is not JSON, with the name of the
        field, and for an answer that is not JSON. An incomplete answer is retried.
        """
        url, body, tries = f"{self.url}{path}", _encoded(content), Tries(self.timeout_seconds, self.most_tries)
        headers = {"Content-Type": "application/json", **bearer(self.key), **self.headers}
        start_deadline: float | None = None
        answered = ""
        while True:
            retry_after_seconds = 0.0
            request = urllib.request.Request(url, body, headers)
            try:
                answer = fetch(request, timeout_seconds=tries.seconds_left, own=self.starting_seconds > 0)
                return read(_parsed(answer))
            except ValueError as error:
                raise ValueError(f"{_place(url)}: {error}") from error
            except urllib.error.HTTPError as error:
                problem = refusal(error)
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
                    start_deadline = start_deadline or time.monotonic() + self.starting_seconds
                    if time.monotonic() < start_deadline:
                        tries.begin_again(LONGEST_PAUSE_SECONDS + self.timeout_seconds)
                else:
                    start_deadline = None
            self.check()
            pause_seconds = tries.pause(retry_after_seconds)
            if pause_seconds is None:
                times = f"{tries.count} {'try' if tries.count == 1 else 'tries'}"
                raise OSError(f"{_place(url)}: {problem}, after {times}")
            pause(pause_seconds)


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
    secrets = secret_headers(key, headers_from_environment)
    server = ScoreServer(url, deadline_seconds, concurrent, headers={**(headers or {}), **secrets})
    columns: dict[str, Sequence[JSONValue]] = {
        "prompt": prompts, "response": responses, "answer": answers, "metadata": metadata,
        "conversation": conversations, "truncated": truncated,
    }  # fmt: skip
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def score_in(answer: JSONValue) -> float:
        return number_in(answer, answer.get("score") if isinstance(answer, dict) else None, "score")

    return server.each(lambda sample: server.post("", sample, score_in), samples)


def number_in(answer: JSONValue, value: JSONValue, name: str) -> float:
    """Return the value of the field `name` of an answer, if it is a number. Raises the errors of `read` in `post`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise_reported_error(answer)
        raise ValueError(f"answered {shortened(redacted(json.dumps(answer)))}, must have a number as {name}")
    return as_float(value)


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


def key_in(variable: str | None, whose: str) -> str:
    """Return the key in an environment variable (`key_of`), or "" for None. Raises ValueError for an empty variable."""
    if variable is None:
        return ""
    key = key_of(variable)
    if not key:
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
    return bearer(key_in(key, _SERVERS)) | {
        name: key_in(variable, _SERVERS) for name, variable in (headers_from_environment or {}).items()
    }


def bearer(key: str) -> dict[str, str]:
    """Return the HTTP header with a key, or no header for ""."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def refusal(error: urllib.error.HTTPError) -> str:
    """Return the status of a refused request and the first 200 characters of its body, as a single line without
    secrets. The function closes the response."""
    try:
        with error:
            body = error.read(_BODY_BYTES)
    except (OSError, http.client.HTTPException):
        body = b""
    shown = shortened(one_line(body.decode(errors="replace")), _BODY_CHARACTERS)
    return f"HTTP {error.code} {error.reason}{shown and f': {shown}'}"


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
