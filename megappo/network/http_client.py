"""HTTP client. Requests to servers of the job and of private networks do not use the proxies of the environment.

`http_proxy` and similar variables apply to other hosts. Requests to a name without a dot are direct. Requests to a name
with only loopback or private addresses are direct too. The caller can select direct requests for other servers of the
run. This module imports only the standard library, because reward workers import it at their start.
"""

from __future__ import annotations

import http.client
import io
import os
import socket
import ssl
import threading
import time
import urllib.request
from functools import cache, partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megappo.network.proxies import address_of, is_socks, proxy_variable

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# This limit is far above the size of any score or verdict. It bounds the memory that a broken server can fill.
_LARGEST_ANSWER_BYTES = 16 * 10**6
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def fetch(request: urllib.request.Request, *, timeout_seconds: float, own: bool = False) -> bytes:
    """Return the body of the response, received entirely within `timeout_seconds`. `own`: the server belongs to the
    run, so no proxy is used.

    Raises HTTPError if the status is not a success. Redirections are not followed, because headers contain keys.
    Raises OSError or HTTPException if the server does not respond in time or the response is incomplete. Raises
    ValueError if the response has more than 16 MB, or if `check_proxy` raises it.
    """
    if not own:
        check_proxy(request.full_url)
    proxy = None if own else _proxy_for(request.full_url)
    proxies = {} if proxy is None else {urlsplit(request.full_url).scheme: proxy[1]}
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(proxies), _Http(), _Https(), _Redirections(),
        urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler(), urllib.request.UnknownHandler(),
    ):  # fmt: skip
        opener.add_handler(handler)
    with opener.open(request, timeout=max(0.01, timeout_seconds)) as answer:
        body: bytes = answer.read(_LARGEST_ANSWER_BYTES + 1)
        if len(body) > _LARGEST_ANSWER_BYTES:
            raise ValueError(f"the response has more than {_LARGEST_ANSWER_BYTES} bytes")
        if answer.length:  # `read` with a size does not raise for a short body
            raise http.client.IncompleteRead(body, answer.length)
        return body


def proxy_of(url: str) -> str | None:
    """Return HOST:PORT of the environment's proxy for a URL, or None without a proxy."""
    proxy = _proxy_for(url)
    return None if proxy is None else address_of(proxy[1])


def check_proxy(url: str) -> None:
    """Raise ValueError if the environment selects a SOCKS proxy for a URL. `fetch` supports HTTP proxies only."""
    proxy = _proxy_for(url)
    if proxy is None or not is_socks(proxy[1]):
        return
    parts = urlsplit(url)
    raise ValueError(
        f"requests to {parts.hostname} would use {proxy_variable(*proxy)}, but rewards support only HTTP proxies; "
        f"set {parts.scheme}_proxy to an HTTP proxy, or add {parts.hostname} to no_proxy"
    )


def _proxy_for(url: str) -> tuple[str, str] | None:
    """Return the variable of the environment's proxy for a URL as (`http`, `https` or `all`, value), or None."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    host, kind = parts.hostname or "", parts.scheme if proxies.get(parts.scheme) else "all"
    if (
        not proxies.get(kind)
        or not host
        or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2])
        or _is_near(host)
    ):
        return None
    return kind, proxies[kind]


def _is_near(host: str) -> bool:
    try:
        return not ip_address(host).is_global
    except ValueError:
        pass
    if "." not in host:
        return True
    try:
        return not any(ip_address(address).is_global for address in _addresses(host))
    except OSError:  # perhaps only the proxy can resolve the name
        return False


@cache
def _addresses(host: str) -> tuple[str, ...]:
    return tuple(str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))


def without_proxies(host: str) -> dict[str, str]:
    """Return environment variables with which HTTP clients use no proxy for a host of the job and for loopback.
    Existing entries of the variables are kept."""
    entries = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = [name for name in map(str.strip, entries.split(",")) if name]
    hosts = "*" if "*" in names else ",".join(dict.fromkeys([*names, *_LOOPBACK, host]))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


@cache
def _certificates() -> ssl.SSLContext:
    """Read the certificates of the machine, which takes 50 ms. Callers hold the lock, because all requests of a batch
    start at the same time."""
    return ssl.create_default_context()


_certificates_lock = threading.Lock()


class _InTime(io.RawIOBase):
    """Raw stream of a socket with a total deadline. Without the total deadline, a server could send one byte per second
    without exceeding the timeout of a single read."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, deadline: float) -> None:
        self._raw, self._connection, self._deadline = raw, connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(
        self, connection: socket.socket, debuglevel: int = 0, method: str | None = None, *, deadline: float
    ) -> None:
        super().__init__(connection, debuglevel, method)
        self.fp = io.BufferedReader(_InTime(self.fp.detach(), connection, deadline))


class _Connection(http.client.HTTPConnection):
    def __init__(self, host: str, *, timeout: float = 10.0, **others: Any) -> None:
        super().__init__(host, timeout=timeout, **others)
        self.response_class: Any = partial(_Answer, deadline=time.monotonic() + timeout)


class _SecureConnection(http.client.HTTPSConnection):
    def __init__(self, host: str, *, timeout: float = 10.0, **others: Any) -> None:
        super().__init__(host, timeout=timeout, **others)
        self.response_class: Any = partial(_Answer, deadline=time.monotonic() + timeout)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


class _Https(urllib.request.AbstractHTTPHandler):
    """Handler of https that reads certificates at the first request. `urllib.request.HTTPSHandler` already reads them
    in its constructor."""

    https_request = urllib.request.AbstractHTTPHandler.do_request_

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        with _certificates_lock:
            context = _certificates()
        return self.do_open(_SecureConnection, request, context=context)


class _Redirections(urllib.request.HTTPRedirectHandler):
    """Handler that rejects redirections. They would send keys to another server, and turn a POST into a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None
