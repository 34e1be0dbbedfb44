"""Sends control requests to one SGLang server, each with a deadline."""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from megappo.observe.json_values import JSONValue

HEALTH = "/health_generate"
"""Endpoint that answers 200 where a server can generate: SGLang makes one token for it, or has made some lately."""


_WHO = "/model_info"
"""Endpoint that a running server answers to whoever has its key."""


class ServerFailure(Exception):
    """A server did not answer, or refused; the message names server, request and reason."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the answer that refused; None where there was no answer."""


@dataclass(frozen=True)
class Endpoint:
    """Address and key of a server; the same on every rank."""

    index: int
    url: str
    key: str = field(repr=False)
    sender: int
    """Rank that looks after the server: it sends its weights, and started it where it is one of our own."""
    starts: int = 1
    """Number of starts of the server, the first included; each start is another process."""
    called: str = ""
    """Name of a server that does not belong to the engine; "" for the engine's own."""

    @property
    def name(self) -> str:
        """Name of the server in the log and in errors."""
        return f"{self.called or f'server {self.index}'} ({self.url})"

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that every request needs: the server wants its key."""
        headers = {"Content-Type": "application/json"}
        return headers | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


def call(
    endpoint: Endpoint,
    path: str,
    body: Mapping[str, JSONValue] | None = None,
    *,
    timeout_seconds: float,
    method: str = "POST",
) -> dict[str, Any]:
    """Send one request and return the JSON of its answer, {} where there is none.

    Raises ServerFailure without an answer in time, with a status other than 200, and where the answer says that it
    did not succeed.
    """
    parts = urlsplit(endpoint.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_seconds)
    try:
        connection.request(method, path, json.dumps(body or {}) if method == "POST" else None, endpoint.headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except TimeoutError:
        raise ServerFailure(f"{endpoint.name} did not answer {path} within {timeout_seconds:g} seconds") from None
    except (OSError, http.client.HTTPException) as error:
        raise ServerFailure(f"{endpoint.name} cannot be reached for {path} ({error!r})") from None
    finally:
        connection.close()
    answer = _parse(text)
    if response.status != 200 or answer.get("success") is False:
        raise ServerFailure(f"{endpoint.name} refused {path} ({response.status}): {text[:500]}", response.status)
    return answer


def failures_of(
    endpoints: Iterable[Endpoint], path: str, body: Mapping[str, JSONValue], timeout_seconds: float
) -> dict[int, str]:
    """Send each of these servers a request; returns why it failed, by the numbers of those where it did."""
    failed = dict[int, str]()
    for endpoint in endpoints:
        try:
            call(endpoint, path, body, timeout_seconds=timeout_seconds)
        except ServerFailure as failure:
            failed[endpoint.index] = str(failure)
    return failed


def _parse(text: str) -> dict[str, JSONValue]:
    try:
        answer = json.loads(text) if text else {}
    except json.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {"answer": answer}


def takes(endpoint: Endpoint, timeout_seconds: float) -> bool:
    """Whether the program at the endpoint accepts the endpoint's key. Raises ServerFailure where there is no answer, or
    one with a status other than 200 and 401."""
    try:
        call(endpoint, _WHO, timeout_seconds=timeout_seconds, method="GET")
    except ServerFailure as failure:
        if failure.status != HTTPStatus.UNAUTHORIZED:
            raise
        return False
    return True


def takes_any_key(endpoint: Endpoint, timeout_seconds: float) -> bool:
    """Whether the program at the endpoint accepts a random key. If so it is not our server, and is not sent the real
    key. Raises as `takes`."""
    return takes(replace(endpoint, key=secrets.token_hex(16)), timeout_seconds)


def is_alive(endpoint: Endpoint, timeout_seconds: float) -> bool:
    """Whether the server can generate."""
    with suppress(ServerFailure):
        call(endpoint, HEALTH, timeout_seconds=timeout_seconds, method="GET")
        return True
    return False
