"""Worker processes for tools, controlled by the event loop of the episodes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any

from megappo.config.sections.environment import ToolSettings
from megappo.environments.tools.confinement import why_not
from megappo.environments.tools.sandbox import Sandbox
from megappo.environments.tools.tool_worker import LIMITS, ToolChoice
from megappo.environments.turns import ToolResult
from megappo.errors import RunError
from megappo.plugins import load_function
from megappo.rewards.processes.channel import ForeignMessageError
from megappo.rewards.processes.variables import plain_variables
from megappo.rewards.processes.workers import Worker

_PROGRAM = "megappo.environments.tools.tool_worker"
_OURS = "megappo."
_START_SECONDS = 120.0
_GRACE_SECONDS = 15.0
"""Seconds beyond the limit of a call. The worker itself must end the call within this time."""


class ToolPool:
    """Pool of `ToolSettings.workers` worker processes. A worker is started when a call needs it."""

    def __init__(
        self, functions: Mapping[str, str], settings: ToolSettings, programs: Mapping[str, str] | None = None
    ) -> None:
        """Check the tools.

        `functions`: import paths by tool name. `programs`: argument of each tool that contains a program. The sandbox
        runs such programs if configured. Raises ValueError for tools that cannot be imported, a sandbox that no tool
        uses, or programs that this machine cannot confine.
        """
        for name, path in functions.items():
            load_function(path, f"tool '{name}'")
        if programs and settings.confined and settings.sandbox is None and (problem := why_not()):
            raise ValueError(
                f"tool '{min(programs)}' runs programs of the model, which this machine cannot confine to a folder "
                f"({problem}); set rollout.environment.tools.sandbox, or rollout.environment.tools.confined=false "
                "if programs of the model may do everything that you can do"
            )
        self._settings = settings
        self._choice = ToolChoice(
            dict(functions),
            settings.timeout_seconds,
            int(settings.memory_gigabytes * 1e9),
            settings.processes,
            settings.output_characters,
            tuple(n for n, path in functions.items() if path.startswith(_OURS) or n in (programs or {})),
            settings.confined and not why_not(),
        )
        self._variables = plain_variables if set(self._choice.bare) == set(functions) else dict
        self._places = asyncio.Semaphore(settings.workers)
        self._programs, self._sandbox = dict(programs or {}), None
        if settings.sandbox is not None:
            if not programs:
                raise ValueError(
                    "rollout.environment.tools.sandbox is set, but no tool of the environment runs programs; "
                    "remove it, or name the tools in `programs` of the environment"
                )
            self._sandbox = Sandbox(settings)
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._left: list[asyncio.Future[Worker]] = []
        """Started workers of cancelled calls, for the next calls."""
        self._calls = 0

    def again(self) -> ToolPool:
        """Return a new pool of the same tools for another event loop."""
        return ToolPool(self._choice.functions, self._settings, self._programs)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool in a worker, or run its program in the sandbox.

        Raises ValueError for an unknown tool, RunError if no worker starts, and SandboxError if the sandbox does not
        run the program.
        """
        if tool not in self._choice.functions:
            known = ", ".join(self._choice.functions) or "none"
            raise ValueError(f"there is no tool '{tool}'; the environment's tools are {known}")
        if self._sandbox is not None and tool in self._programs:
            return await self._sandbox.run(str(arguments[self._programs[tool]]))
        async with self._places:
            worker = await self._ready_worker()
            start, is_well = time.monotonic(), False
            try:
                failure, text = await self._send_call(worker, tool, arguments)
                is_well = failure not in ("hung", "gone")
            finally:
                self._return_worker(worker, is_well)
        failure = {"hung": "time", "gone": "died"}.get(failure, failure)
        if failure:
            text = f"Error: {LIMITS[failure]}" if failure != "raised" else f"Error: {text}"
        return ToolResult(text, failure, time.monotonic() - start)

    def _return_worker(self, worker: Worker, is_well: bool) -> None:
        if is_well:
            self._idle.append(worker)
        else:  # the worker has ended, or still works on a cancelled call
            self._workers.discard(worker)
            worker.hang_up()
            asyncio.get_running_loop().run_in_executor(None, worker.wait)

    async def _ready_worker(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.supervisor.poll() is None and not worker.speaks:
                return worker
            self._return_worker(worker, is_well=False)  # the worker ended between two calls
        start = self._left.pop() if self._left else asyncio.ensure_future(self._start())
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            if not start.cancelled():
                self._left.append(start)
                start.add_done_callback(
                    lambda done: done.cancelled() or done.exception()
                )  # the next call gets the error
            raise

    async def _start(self) -> Worker:
        """Start a worker. Raises RunError if the worker does not start."""
        worker = Worker(self._choice, _PROGRAM, self._variables)
        self._workers.add(worker)
        is_well = False
        try:
            state, message = await receive(worker, _START_SECONDS)
            is_well = state != "broken"
        except (EOFError, OSError, TimeoutError, ForeignMessageError) as error:
            raise RunError(f"a worker of tools does not start ({type(error).__name__}); see its messages") from error
        finally:
            if not is_well:
                self._return_worker(worker, is_well=False)
        if not is_well:
            raise RunError(str(message))
        return worker

    async def _send_call(self, worker: Worker, tool: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
        self._calls += 1
        try:
            worker.channel.send((self._calls, tool, dict(arguments)))
            _, failure, text = await receive(worker, self._choice.timeout_seconds + _GRACE_SECONDS)
        except TimeoutError:
            return "hung", ""
        except (EOFError, OSError, ForeignMessageError):
            return "gone", ""
        return failure, text

    def close(self) -> None:
        """End all workers at the same time."""
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.wait()
        self._workers, self._idle, self._left = set(), [], []


async def receive(worker: Worker, seconds: float) -> list[Any]:
    """Return the next answer of the worker. Raises TimeoutError, EOFError, OSError, ForeignMessageError."""
    loop, socket = asyncio.get_running_loop(), worker.channel.answers
    came = asyncio.Event()
    loop.add_reader(socket, came.set)
    try:
        deadline = loop.time() + seconds
        while True:
            came.clear()
            if (answer := worker.channel.receive()) is not None:
                return answer
            if loop.time() >= deadline:
                raise TimeoutError
            try:
                await asyncio.wait_for(came.wait(), None if deadline == math.inf else deadline - loop.time())
            except TimeoutError:
                continue  # check again: the answer may have arrived while the loop was blocked
    finally:
        loop.remove_reader(socket)
