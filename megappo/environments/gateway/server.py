"""HTTP server for the agents of a rank's episodes, in the event loop of the episodes.

The key of a request identifies its episode.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import ModuleType
from urllib.parse import urlsplit

from aiohttp import web

from megappo.environments.gateway import anthropic_api, openai_api
from megappo.environments.gateway.recording import Recorder
from megappo.environments.gateway.wire import RefusedError
from megappo.environments.turns import LimitReached
from megappo.errors import RunError, reason
from megappo.network.http_client import without_proxies

_LARGEST_BODY_BYTES = 64 * 10**6
_NEVER_AGAIN = {"x-should-retry": "false"}
"""Header that prevents retries by both SDKs. A retry would get the same answer."""


@dataclass(frozen=True)
class AgentEndpoint:
    """Address and key of the model for the agent of one episode."""

    base_url: str
    """Base URL for OpenAI SDKs. The URL ends in `/v1`."""
    anthropic_base_url: str
    """Base URL for Anthropic SDKs, which add `/v1`."""
    api_key: str = field(repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the agent: variables of the SDKs, and variables that exclude the gateway from
        proxies."""
        return without_proxies(urlsplit(self.base_url).hostname or "") | {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


@dataclass
class _Serving:
    recorder: Recorder
    answering: set[asyncio.Task[None]] = field(default_factory=set)


class Gateway:
    """HTTP server on one interface. The server starts when the first episode needs it."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._served: dict[str, _Serving] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._starts = asyncio.Lock()

    def again(self) -> Gateway:
        """Return a new gateway for another event loop."""
        return Gateway(self._host)

    @asynccontextmanager
    async def serve(self, recorder: Recorder) -> AsyncIterator[AgentEndpoint]:
        """See `Session.serve`. Raises RunError if the server cannot listen."""
        await self._listen()
        key = f"megappo-{secrets.token_urlsafe(24)}"
        served = self._served[key] = _Serving(recorder)
        try:
            yield AgentEndpoint(f"{self._url}/v1", self._url, key)
        except Exception as error:
            if recorder.error is None and recorder.limit is not None:
                raise LimitReached(recorder.limit) from error
            raise recorder.error or error from error
        finally:
            del self._served[key]
            for task in served.answering:
                task.cancel()
        if recorder.error is not None:
            raise recorder.error

    async def _listen(self) -> None:
        async with self._starts:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=_LARGEST_BODY_BYTES)
            app.router.add_post("/v1/chat/completions", _route(self._served, openai_api))
            app.router.add_post("/v1/messages", _route(self._served, anthropic_api))
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0, handler_cancellation=True)
            await runner.setup()
            try:
                await web.TCPSite(runner, self._host, 0).start()
            except OSError as error:
                await runner.cleanup()
                raise RunError(
                    f"agents cannot be served on rollout.environment.gateway_host '{self._host}' ({reason(error)}); "
                    "set it to an address of this machine"
                ) from error
            host, port = runner.addresses[0][:2]
            self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            os.environ |= without_proxies(host)  # for agents that are functions in this process
            self._runner = runner

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


def _route(served: dict[str, _Serving], api: ModuleType) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the request handler of one protocol."""

    def failed(status: int, message: str, kind: str, code: str) -> web.Response:
        return web.json_response(api.error(message, kind, code), status=status, headers=_NEVER_AGAIN)

    async def answer(request: web.Request, recorder: Recorder) -> web.StreamResponse:
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            return failed(400, f"the request is no JSON ({error})", "request", "invalid_value")
        try:
            if not isinstance(body, dict):
                raise RefusedError("the request is no object")
            chat_request = api.read_request(body)
            turn = await recorder.answer(chat_request)
        except RefusedError as refused:
            return failed(400, str(refused), "request", "invalid_value")
        except LimitReached as reached:
            code = "context_length_exceeded" if reached.limit in ("tokens", "positions") else "limit_reached"
            return failed(400, f"{reached}, so the episode is over", "request", code)
        except RunError as error:
            return failed(500, str(error), "server", "server_error")
        if not chat_request.stream:
            return web.json_response(api.answer(chat_request, turn))
        return web.Response(body=b"".join(api.chunks(chat_request, turn)), content_type="text/event-stream")

    async def handle(request: web.Request) -> web.StreamResponse:
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        mine = served.get(key)
        if mine is None:
            return failed(401, "the key belongs to no running episode", "authentication", "invalid_api_key")
        task = asyncio.current_task()
        assert task is not None
        mine.answering.add(task)
        try:
            return await answer(request, mine.recorder)
        finally:
            mine.answering.discard(task)

    return handle
