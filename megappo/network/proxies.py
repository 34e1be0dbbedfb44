"""Proxies in the variables of the environment, such as `https_proxy`.

Standard library only, as reward workers start with this module.
"""

from __future__ import annotations

import os
import urllib.request
from importlib.util import find_spec


def client_proxy_problem() -> str | None:
    """Why httpx, the client of the Hugging Face hub and of the SDKs of OpenAI and Anthropic, cannot use the proxies of
    the environment; None where it can. It makes no client at all then, also for servers that need no proxy."""
    proxies = urllib.request.getproxies()
    kind = next((kind for kind in ("http", "https", "all") if is_socks(proxies.get(kind, ""))), None)
    if kind is None or "*" in proxies.get("no", "").replace(" ", "").split(","):
        return None
    words = shown(kind, proxies[kind])
    if proxies[kind].lower().partition("://")[0] not in ("socks5", "socks5h"):
        return f"httpx cannot use the proxy {words}; write socks5://HOST:PORT, or name an HTTP proxy"
    if find_spec("socksio") is None:
        return f"httpx needs the package socksio for the proxy {words}; pip install socksio, or name an HTTP proxy"
    return None


def is_socks(proxy: str) -> bool:
    """Whether the value of a variable names a SOCKS proxy."""
    return proxy.lower().startswith("socks")


def shown(kind: str, proxy: str) -> str:
    """Returns the variable and its value, without a password. `kind`: `http`, `https` or `all`."""
    name = next((n for n in (f"{kind}_proxy", f"{kind}_proxy".upper()) if os.environ.get(n) == proxy), f"{kind}_proxy")
    return f"{name}={proxy.partition('://')[0]}://{address_of(proxy)}"


def address_of(proxy: str) -> str:
    """Returns HOST:PORT."""
    return proxy.rpartition("@")[2].rpartition("//")[2].rstrip("/")
