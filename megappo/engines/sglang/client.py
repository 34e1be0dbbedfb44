"""Send control requests to one SGLang server, with a deadline for each request."""

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

from megappo.files.json_values import JSONValue

HEALTH = "/health_generate"
"""Health endpoint. Returns 200 if the server can generate. SGLang generates one token for the check, unless it has
generated tokens recently."""


_WHO = "/model_info"
"""Endpoint of a running server that requires the key."""


class ServerFailure(Exception):
    """Failed request to a server. The message contains the server, the request and the reason."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the response, or None if there was no response."""


@dataclass(frozen=True)
class Endpoint:
    """Address and key of a server. The values are the same on every rank."""

    index: int
    url: str
    key: str = field(repr=False)
    sender: int
    """Rank that manages the server. This rank sends the weights, and has started the server unless the server is
    external."""
    starts: int = 1
    """Number of starts of the server, including the first. Each start creates a new process."""
    called: str = ""
    """Name of a server outside the engine, or "" for a server of the engine."""

    @property
    def name(self) -> str:
        """Name of the server in logs and errors."""
        return f"{self.called or f'server {self.index}'} ({self.url})"

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of every request. The headers include the key of the server."""
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
    """Send one request and return the JSON of the response, or {} if the response is empty.

    Raises ServerFailure if there is no response before the deadline, if the status is not 200, or if the response
    reports a failure.
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
    """Send a request to each server and return the failure reasons by server number."""
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
    """Return whether the program at the endpoint accepts the key of the endpoint.

    Raises ServerFailure if there is no response, or if the status is neither 200 nor 401.
    """
    try:
        call(endpoint, _WHO, timeout_seconds=timeout_seconds, method="GET")
    except ServerFailure as failure:
        if failure.status != HTTPStatus.UNAUTHORIZED:
            raise
        return False
    return True


def takes_any_key(endpoint: Endpoint, timeout_seconds: float) -> bool:
    """Return whether the program at the endpoint accepts a random key. Such a program is not our server and must not
    receive the real key. Raises as `takes`."""
    return takes(replace(endpoint, key=secrets.token_hex(16)), timeout_seconds)


def is_alive(endpoint: Endpoint, timeout_seconds: float) -> bool:
    """Return whether the server can generate."""
    with suppress(ServerFailure):
        call(endpoint, HEALTH, timeout_seconds=timeout_seconds, method="GET")
        return True
    return False
