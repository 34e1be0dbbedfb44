"""Control requests to one SGLang server, each with a deadline."""

from __future__ import annotations

import http.client
import json
import secrets
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

HEALTH = "/health_generate"
"""Answered well by a server that can generate: SGLang makes one token, or has made some lately."""


_WHO = "/model_info"
"""Answered by a server that is up to those who have its key."""


class ServerFailure(Exception):
    """A server did not answer, or refused; the message names server, request and reason."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP's, of an answer that refuses."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens; the same on every rank."""

    index: int
    url: str
    key: str = field(repr=False)
    sender: int
    """Rank that sends weights to it (and started it, where it is one of our own)."""
    starts: int = 1
    """How often the server was started, the first time included; a new start is another process."""
    called: str = ""
    """What it is called where it is no server of the engine's."""

    @property
    def name(self) -> str:
        """What the log and errors call the server."""
        return f"{self.called or f'server {self.index}'} ({self.url})"

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that every request needs: the server wants its key."""
        headers = {"Content-Type": "application/json"}
        return headers | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


def call(
    endpoint: Endpoint, path: str, body: dict[str, Any] | None = None, *, timeout_seconds: float, method: str = "POST"
) -> dict[str, Any]:
    """One request; returns the answer's JSON, {} where there is none.

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


def _parse(text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text) if text else {}
    except json.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {"answer": answer}


def takes(endpoint: Endpoint, timeout_seconds: float) -> bool:
    """Whether what listens takes the endpoint's key. Raises ServerFailure for no answer, and for another than 200 and
    401."""
    try:
        call(endpoint, _WHO, timeout_seconds=timeout_seconds, method="GET")
    except ServerFailure as failure:
        if failure.status != HTTPStatus.UNAUTHORIZED:
            raise
        return False
    return True


def takes_any_key(endpoint: Endpoint, timeout_seconds: float) -> bool:
    """Whether it takes a key that nobody has: then it is not the server that has this one, which it is not told. Raises
    as `takes`."""
    return takes(replace(endpoint, key=secrets.token_hex(16)), timeout_seconds)


def is_alive(endpoint: Endpoint, timeout_seconds: float) -> bool:
    """Whether the server can generate."""
    try:
        call(endpoint, HEALTH, timeout_seconds=timeout_seconds, method="GET")
    except ServerFailure:
        return False
    return True
