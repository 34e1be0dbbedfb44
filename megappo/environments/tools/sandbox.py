"""Execution of model programs by an HTTP service with SandboxFusion's protocol, `POST /run_code`.

The service does not run programs on the trainer's machine, unlike the workers of `tool_pool`. Its answer is used as
the output of the program. Failures of the service are retried until the deadline of the call.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Literal

import aiohttp
from pydantic import BaseModel, ValidationError

from megappo.config.sections.environment import ToolSettings
from megappo.environments.tools.tool_worker import LIMITS, cut
from megappo.environments.turns import ToolResult
from megappo.errors import reason
from megappo.files.json_values import JSONValue
from megappo.network.retrying import TRANSIENT, Tries, requested_pause

_SERVICE_SECONDS = 5.0
"""Seconds for the service itself, in addition to the time limit of a program."""
_LARGEST_ANSWER_BYTES = 16 * 10**6


class SandboxError(Exception):
    """The service did not run a program in time. The sample fails, so that the model does not learn from the
    failure."""


class _RanProgram(BaseModel):
    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    stdout: str | None = None
    stderr: str | None = None


class _SandboxAnswer(BaseModel):
    """Used fields of SandboxFusion's RunCodeResponse."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: _RanProgram | None = None
    run_result: _RanProgram | None = None


class _TryAgainError(Exception):
    """An answer of the service that may differ on a retry, after at least the pause that the service requests."""

    def __init__(self, problem: str, min_pause_seconds: float = 0.0) -> None:
        super().__init__(problem)
        self.min_pause_seconds = min_pause_seconds


class Sandbox:
    """Client of the service, used from the event loop of the episodes."""

    def __init__(self, settings: ToolSettings) -> None:
        assert settings.sandbox is not None
        self._service, self._limits = settings.sandbox, settings
        self._places = asyncio.Semaphore(settings.sandbox.concurrent)

    async def run(self, code: str, language: str = "python") -> ToolResult:
        """Run a program and return its output. Raises SandboxError if the service does not answer in time."""
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
            min_pause_seconds = 0.0
            try:
                async with asyncio.timeout(max(0.0, tries.seconds_left)):
                    return await self._post(code, language)
            except TimeoutError:
                problem = "it does not answer"
            except (_TryAgainError, aiohttp.ClientError, OSError) as error:
                problem, min_pause_seconds = (
                    reason(error) or type(error).__name__,
                    getattr(error, "min_pause_seconds", 0.0),
                )
            pause_seconds = tries.pause(min_pause_seconds)
            if pause_seconds is None:
                raise SandboxError(f"{self._name} has run no program in {tries.count} attempts: {problem}")
            await asyncio.sleep(pause_seconds)

    async def _post(self, code: str, language: str) -> _SandboxAnswer:
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
                raise _TryAgainError(f"status {answer.status}", requested_pause(answer.headers))
            if answer.status != 200:
                raise SandboxError(
                    f"{self._name} answers with status {answer.status}; the URL must belong to a SandboxFusion service"
                )
            content = await _read(answer)
        try:
            result = _SandboxAnswer.model_validate(json.loads(content))
        except (ValueError, RecursionError, ValidationError) as error:
            raise _TryAgainError("the answer is not in SandboxFusion's format") from error
        if result.status == "SandboxError":
            raise _TryAgainError(f"it reports an internal error: {result.message[:100]}")
        if result.run_result is None and result.compile_result is None:
            raise _TryAgainError("it answers without a result")
        return result

    def _result(self, answer: _SandboxAnswer, seconds: float) -> ToolResult:
        run = answer.run_result or answer.compile_result
        assert run is not None
        if run.status == "TimeLimitExceeded":
            return ToolResult(f"Error: {LIMITS['time']}", "time", seconds)
        return ToolResult(cut((run.stdout or "") + (run.stderr or ""), self._limits.output_characters), "", seconds)


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer. Raises _TryAgainError above `_LARGEST_ANSWER_BYTES`."""
    content = b""
    async for piece in answer.content.iter_any():
        content += piece
        if len(content) > _LARGEST_ANSWER_BYTES:
            raise _TryAgainError(f"its answer is longer than {_LARGEST_ANSWER_BYTES} bytes")
    return content
