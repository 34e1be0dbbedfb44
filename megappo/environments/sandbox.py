"""Programs that a model writes, run by a service over HTTP: SandboxFusion's protocol, `POST /run_code`.

The service keeps programs off the trainer's machine, which the workers of `tool_pool` do not. Its answer is taken as
the program's output. Failures of the service itself are retried until the call's time is up.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Literal

import aiohttp
from pydantic import BaseModel, ValidationError

from megappo.config.environment import ToolSettings
from megappo.environments.protocol import ToolResult
from megappo.environments.tool_worker import LIMITS, cut
from megappo.errors import reason
from megappo.observe.json_values import JSONValue
from megappo.runtime.retrying import TRANSIENT, Tries, asked_pause

_SERVICE_SECONDS = 5.0
"""Seconds that the service has for itself, besides the time that a program may take."""
_LARGEST_ANSWER_BYTES = 16 * 10**6


class SandboxError(Exception):
    """The service did not run a program in time. The sample fails, as a model should not learn from that."""


class _RanProgram(BaseModel):
    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    stdout: str | None = None
    stderr: str | None = None


class _SandboxAnswer(BaseModel):
    """The fields of SandboxFusion's RunCodeResponse that are used."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: _RanProgram | None = None
    run_result: _RanProgram | None = None


class _TryAgainError(Exception):
    """An answer of the service that may be different the next time, after at least the pause that the service asks
    for."""

    def __init__(self, problem: str, asked_seconds: float = 0.0) -> None:
        super().__init__(problem)
        self.asked_seconds = asked_seconds


class Sandbox:
    """Client of the service, used from the event loop of the episodes."""

    def __init__(self, settings: ToolSettings) -> None:
        assert settings.sandbox is not None
        self._service, self._limits = settings.sandbox, settings
        self._places = asyncio.Semaphore(settings.sandbox.concurrent)

    async def run(self, code: str, language: str = "python") -> ToolResult:
        """Run a program and return what it printed. Raises SandboxError where the service gives no answer in time."""
        async with self._places:
            start = time.monotonic()
            answer = await self._answer(code, language)
            return self._result(answer, time.monotonic() - start)

    @property
    def _name(self) -> str:
        return f"rollout.environment.tools.sandbox.url '{self._service.url}'"

    async def _answer(self, code: str, language: str) -> _SandboxAnswer:
        tries = Tries(self._service.deadline_seconds, self._service.retries + 1)
        while True:
            asked_seconds = 0.0
            try:
                async with asyncio.timeout(max(0.0, tries.seconds_left)):
                    return await self._ask(code, language)
            except TimeoutError:
                problem = "it does not answer"
            except (_TryAgainError, aiohttp.ClientError, OSError) as error:
                problem, asked_seconds = reason(error) or type(error).__name__, getattr(error, "asked_seconds", 0.0)
            pause_seconds = tries.pause(asked_seconds)
            if pause_seconds is None:
                raise SandboxError(f"{self._name} has run no program in {tries.count} attempts: {problem}")
            await asyncio.sleep(pause_seconds)

    async def _ask(self, code: str, language: str) -> _SandboxAnswer:
        body: dict[str, JSONValue] = {
            "code": code,
            "language": language,
            "compile_timeout": self._limits.timeout_seconds,
            "run_timeout": self._limits.timeout_seconds,
            "memory_limit_MB": max(1, int(self._limits.memory_gigabytes * 1000)),
            "stdin": "",
            "files": {},
            "fetch_files": [],
        }
        timeout = aiohttp.ClientTimeout(total=2 * self._limits.timeout_seconds + _SERVICE_SECONDS)
        url = f"{self._service.url.rstrip('/')}/run_code"
        async with aiohttp.ClientSession(timeout=timeout) as http, http.post(url, json=body) as answer:
            if answer.status >= 500 or answer.status in TRANSIENT:
                raise _TryAgainError(f"status {answer.status}", asked_pause(answer.headers))
            if answer.status != 200:
                raise SandboxError(f"{self._name} answers with status {answer.status}; it should be SandboxFusion's")
            told = await _read(answer)
        try:
            found = _SandboxAnswer.model_validate(json.loads(told))
        except (ValueError, RecursionError, ValidationError) as error:
            raise _TryAgainError("what it answers is not SandboxFusion's") from error
        if found.status == "SandboxError":
            raise _TryAgainError(f"it reports an error of its own: {found.message[:100]}")
        if found.run_result is None and found.compile_result is None:
            raise _TryAgainError("it answers without a result")
        return found

    def _result(self, answer: _SandboxAnswer, seconds: float) -> ToolResult:
        run = answer.run_result or answer.compile_result
        assert run is not None
        if run.status == "TimeLimitExceeded":
            return ToolResult(f"Error: {LIMITS['time']}", "time", seconds)
        return ToolResult(cut((run.stdout or "") + (run.stderr or ""), self._limits.output_characters), "", seconds)


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer. Raises _TryAgainError above `_LARGEST_ANSWER_BYTES`."""
    told = b""
    async for piece in answer.content.iter_any():
        told += piece
        if len(told) > _LARGEST_ANSWER_BYTES:
            raise _TryAgainError(f"its answer is longer than {_LARGEST_ANSWER_BYTES} bytes")
    return told
