"""Tests of programs that run in a sandbox service over HTTP, and of slow or failing services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megappo.config.sections.environment import SandboxSettings, ToolSettings
from megappo.environments.tool_calling import ToolCalling
from megappo.environments.tools.sandbox import SandboxError
from megappo.environments.tools.tool_pool import ToolPool
from megappo.environments.turns import ToolResult

pytestmark = pytest.mark.waits

Answer = Callable[[dict[str, Any]], Awaitable[web.Response]]


def ran(stdout: str = "", stderr: str = "", status: str = "Finished", of: str = "Success") -> web.Response:
    """Return a response in the format of SandboxFusion."""
    run = {"status": status, "execution_time": 0.01, "return_code": 0, "stdout": stdout, "stderr": stderr}
    return web.json_response({"status": of, "message": "", "compile_result": None, "run_result": run, "files": {}})


@asynccontextmanager
async def service(answer: Answer) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Start a stand-in service. Yield its address and the list of received requests."""
    requests: list[dict[str, Any]] = []

    async def run_code(request: web.Request) -> web.Response:
        requests.append(await request.json())
        return await answer(requests[-1])

    app = web.Application()
    app.router.add_post("/run_code", run_code)
    async with TestServer(app) as server:
        yield str(server.make_url("/")), requests


def called(answer: Answer, *codes: str, path: str = "", **settings: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Run programs concurrently. Return their results, including errors, and the requests to the service."""
    limits = {"timeout_seconds": 1.0, "memory_gigabytes": 0.5, "output_characters": 100}

    async def call() -> tuple[list[Any], list[dict[str, Any]]]:
        async with service(answer) as (url, requests):
            sandbox = {"url": url + path, "deadline_seconds": 3.0} | settings
            tools = ToolCalling(tools=["python"])
            pool = ToolPool(tools.tools, ToolSettings.model_validate(limits | {"sandbox": sandbox}), tools.programs)
            calls = [pool.call("python", {"code": code}) for code in codes]
            return await asyncio.gather(*calls, return_exceptions=True), requests

    return asyncio.run(call())


def test_service_runs_code_of_python_tool() -> None:
    async def answer(sent: dict[str, Any]) -> web.Response:
        return ran(f"ran {sent['code']}\n", "and a warning")

    [result], [sent] = called(answer, "print(1)")
    assert (result.text, result.failure) == ("ran print(1)\nand a warning", "") and result.seconds > 0
    assert sent == {
        "code": "print(1)", "language": "python", "compile_timeout": 1.0, "run_timeout": 1.0, "memory_limit_MB": 500,
        "stdin": "", "files": {}, "fetch_files": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("response", "text", "failure"),
    [
        (lambda: ran(stderr="ZeroDivisionError", status="Error", of="Failed"), "ZeroDivisionError", ""),
        (lambda: ran(status="TimeLimitExceeded", of="Failed"), "Error: it ran out of time", "time"),
        (lambda: ran("x" * 10**6), f"{'x' * 50}\n... 999900 characters left out ...\n{'x' * 50}", ""),
        (lambda: ran(), "", ""),
    ],
)
def test_program_outcome_becomes_tool_result(response: Any, text: str, failure: str) -> None:
    async def answer(sent: dict[str, Any]) -> web.Response:
        made: web.Response = response()
        return made

    [result], _ = called(answer, "x")
    assert isinstance(result, ToolResult) and (result.text, result.failure) == (text, failure)


@pytest.mark.parametrize(
    "first",
    [
        lambda: web.Response(status=503),
        lambda: web.Response(status=429),
        lambda: web.Response(text="<html>"),
        lambda: web.json_response({"status": "SandboxError", "message": "no place"}),
        lambda: web.json_response({"status": "Success", "run_result": {"status": "Splendid"}}),
        lambda: web.json_response({"status": "Success", "run_result": {"status": "Finished", "stdout": 7}}),
        lambda: web.json_response({"status": "Success"}),
        lambda: web.Response(text="[" * 100000),
        lambda: web.Response(body=b" " * (17 * 10**6)),
    ],
)
def test_invalid_service_answers_are_retried(first: Any) -> None:
    answers = iter([first])

    async def answer(sent: dict[str, Any]) -> web.Response:
        made: web.Response = next(answers, lambda: ran("42"))()
        return made

    [result], sent = called(answer, "x")
    assert isinstance(result, ToolResult) and result.text == "42" and len(sent) == 2


def test_persistent_service_failure_fails_the_sample() -> None:
    """The model does not see the failure, so it cannot learn from it. A status 404 is not retried."""

    async def fails(sent: dict[str, Any]) -> web.Response:
        return web.Response(status=500)

    [error], sent = called(fails, "x", retries=2)
    assert isinstance(error, SandboxError) and "has run no program in 3 attempts: status 500" in str(error)
    assert len(sent) == 3
    [error], sent = called(fails, "x", path="elsewhere")
    assert isinstance(error, SandboxError) and "answers with status 404" in str(error) and not sent


def test_retry_after_header_is_honored() -> None:
    """The sample fails at once if the time is after the deadline."""

    async def is_busy(sent: dict[str, Any]) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "600"})

    [error], sent = called(is_busy, "x", retries=9)
    assert isinstance(error, SandboxError) and "has run no program in 1 attempts: status 429" in str(error)
    assert len(sent) == 1


def test_hanging_service_is_abandoned_at_deadline() -> None:
    async def hangs(sent: dict[str, Any]) -> web.Response:
        await asyncio.sleep(3600)
        return ran()

    start = time.monotonic()
    [error], _ = called(hangs, "x", deadline_seconds=0.5)
    assert isinstance(error, SandboxError) and "does not answer" in str(error)
    assert 0.5 <= time.monotonic() - start < 10


def test_concurrent_programs_are_limited() -> None:
    runs: list[int] = [0, 0]

    async def counts(sent: dict[str, Any]) -> web.Response:
        runs[0] += 1
        runs[1] = max(runs)
        await asyncio.sleep(0.05)
        runs[0] -= 1
        return ran(sent["code"])

    results, sent = called(counts, *map(str, range(12)), concurrent=3, deadline_seconds=10.0)
    assert [result.text for result in results] == [str(i) for i in range(12)] and len(sent) == 12
    assert runs == [0, 3]


def test_unusable_sandbox_settings_are_rejected() -> None:
    settings = ToolSettings(sandbox=SandboxSettings(url="http://127.0.0.1:1"))
    with pytest.raises(ValueError, match="no tool of the environment runs programs"):
        ToolPool({}, settings, ToolCalling().programs)
    with pytest.raises(ValueError, match="'127.0.0.1:8080' is not an address of a service"):
        SandboxSettings(url="127.0.0.1:8080")
