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

    def ask(scheme: str) -> None:
        with pytest.raises(urllib.error.URLError):
            fetch(urllib.request.Request(f"{scheme}://127.0.0.1:{port}/"), timeout_seconds=5)

    port = free_port("127.0.0.1")  # where nobody listens
    for scheme, count in (("http", 0), ("https", 1)):
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, [scheme] * 8))
        assert len(made) == count, scheme
