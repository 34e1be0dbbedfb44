"""Proxies in environment variables such as `https_proxy`.

This module imports only the standard library, because reward workers import it at their start.
"""

from __future__ import annotations

import os
import urllib.request
from importlib.util import find_spec


def client_proxy_problem() -> str | None:
    """Return the reason that httpx cannot use the proxies of the environment, or None.

    The Hugging Face hub and the SDKs of OpenAI and Anthropic use httpx. With such a proxy, httpx raises an error when a
    client is created, even if no request needs a proxy.
    """
    proxies = urllib.request.getproxies()
    kind = next((kind for kind in ("http", "https", "all") if is_socks(proxies.get(kind, ""))), None)
    if kind is None or "*" in proxies.get("no", "").replace(" ", "").split(","):
        return None
    proxy_text = proxy_variable(kind, proxies[kind])
    if proxies[kind].lower().partition("://")[0] not in ("socks5", "socks5h"):
        return f"httpx cannot use the proxy {proxy_text}; use socks5://HOST:PORT, or an HTTP proxy"
    if find_spec("socksio") is None:
        return f"httpx needs the package socksio for the proxy {proxy_text}; pip install socksio, or use an HTTP proxy"
    return None


def is_socks(proxy: str) -> bool:
    """Return whether the value of a variable is a SOCKS proxy."""
    return proxy.lower().startswith("socks")


def proxy_variable(kind: str, proxy: str) -> str:
    """Return the name and the value of a variable, without the password. `kind`: `http`, `https` or `all`."""
    name = next((n for n in (f"{kind}_proxy", f"{kind}_proxy".upper()) if os.environ.get(n) == proxy), f"{kind}_proxy")
    return f"{name}={proxy.partition('://')[0]}://{address_of(proxy)}"


def address_of(proxy: str) -> str:
    """Return HOST:PORT of a proxy."""
    return proxy.rpartition("@")[2].rpartition("//")[2].rstrip("/")
