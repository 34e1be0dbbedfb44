"""What it costs to open a URL."""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from megappo.runtime.direct import fetch
from megappo.runtime.store import free_port


@pytest.mark.waits
def test_certificates_are_read_once_and_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ssl.SSLContext] = []
    make = ssl.create_default_context

    def slowly() -> ssl.SSLContext:
        time.sleep(0.05)
        made.append(make())
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", slowly)

    port = free_port("127.0.0.1")  # where nobody listens

    def ask(scheme: str) -> None:
        with pytest.raises(urllib.error.URLError, match="refused"):
            fetch(urllib.request.Request(f"{scheme}://127.0.0.1:{port}/"), timeout_seconds=5)

    for scheme, count in (("http", 0), ("https", 1)):
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, [scheme] * 8))
        assert len(made) == count, scheme


@pytest.mark.waits
def test_a_proxy_is_asked_over_https_for_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"https://127.0.0.1:{free_port('127.0.0.1')}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(urllib.error.URLError, match="refused"):  # by the proxy, where nobody listens
        fetch(urllib.request.Request("http://8.8.8.8/"), timeout_seconds=5)
