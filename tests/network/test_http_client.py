"""HTTP requests use HTTP proxies and refuse SOCKS proxies before a connection is made."""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from megappo.network.http_client import check_proxy, fetch, proxy_of
from megappo.network.proxies import client_proxy_problem
from megappo.network.store import free_port


@pytest.mark.waits
def test_certificates_are_read_once_and_only_for_https(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ssl.SSLContext] = []
    make = ssl.create_default_context

    def slowly() -> ssl.SSLContext:
        time.sleep(0.05)
        made.append(make())
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", slowly)

    port = free_port("127.0.0.1")  # no program listens on this port

    def send_request(scheme: str) -> None:
        with pytest.raises(urllib.error.URLError, match="refused"):
            fetch(urllib.request.Request(f"{scheme}://127.0.0.1:{port}/"), timeout_seconds=5)

    for scheme, count in (("http", 0), ("https", 1)):
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(send_request, [scheme] * 8))
        assert len(made) == count, scheme


@pytest.mark.waits
def test_requests_without_tls_use_a_proxy_with_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"https://127.0.0.1:{free_port('127.0.0.1')}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(urllib.error.URLError, match="refused"):  # no program listens on the port of the proxy
        fetch(urllib.request.Request("http://8.8.8.8/"), timeout_seconds=5)


def only_proxies(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variable", ["ALL_PROXY", "https_proxy"])
@pytest.mark.parametrize("scheme", ["socks5", "socks5h", "socks4", "SOCKS5"])
def test_socks_proxy_is_refused_before_a_request(monkeypatch: pytest.MonkeyPatch, variable: str, scheme: str) -> None:
    only_proxies(monkeypatch, **{variable: f"{scheme}://me:hidden@10.0.0.9:1080"})
    pattern = (
        f"requests to 8.8.8.8 would use {variable}={scheme}://10.0.0.9:1080, but .* set https_proxy to an HTTP proxy"
    )
    with pytest.raises(ValueError, match=pattern):
        check_proxy("https://8.8.8.8/v1")
    with pytest.raises(ValueError, match=pattern):
        fetch(urllib.request.Request("https://8.8.8.8/v1"), timeout_seconds=0.1)
    check_proxy("http://10.0.0.8:30000/v1")  # a server of the job
    monkeypatch.setenv("no_proxy", "8.8.8.8")
    check_proxy("https://8.8.8.8/v1")


def test_all_proxy_is_used_for_schemes_without_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    only_proxies(monkeypatch, ALL_PROXY="http://10.0.0.9:3128", https_proxy="http://10.0.0.7:8080")
    assert [proxy_of(f"{scheme}://8.8.8.8/") for scheme in ("http", "https")] == ["10.0.0.9:3128", "10.0.0.7:8080"]


def test_error_names_a_proxy_without_support_in_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result agrees with httpx for each combination of variables."""
    import httpx

    for value in ("http://p:1", "socks5://me:hidden@p:1", "socks5h://p:1", "socks4://p:1", "socks://p:1"):
        for others in ({}, {"no_proxy": "*"}, {"no_proxy": "localhost"}):
            only_proxies(monkeypatch, all_proxy=value, **others)
            problem = client_proxy_problem()
            try:
                httpx.Client().close()
            except (ImportError, ValueError):
                assert problem is not None and f"all_proxy={value.replace('me:hidden@', '')}" in problem
                assert "; pip install socksio" in problem or "; use socks5://HOST:PORT" in problem
            else:
                assert problem is None, (value, others)
