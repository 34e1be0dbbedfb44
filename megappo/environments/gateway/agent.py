"""Training of unchanged HTTP agents: `rollout.environment.name: agent`, an async function or a program."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from tempfile import TemporaryDirectory

from megappo.environments.gateway.agent_worker import AgentProgram
from megappo.environments.gateway.server import AgentEndpoint
from megappo.environments.session import Session
from megappo.environments.tools.tool_calls import call_format
from megappo.environments.tools.tool_pool import receive
from megappo.errors import home_expanded, show
from megappo.files.json_values import JSONValue
from megappo.network.proxies import client_proxy_problem
from megappo.observe.terminal.messages import show_message
from megappo.plugins import load
from megappo.rewards.processes.channel import ForeignMessageError
from megappo.rewards.processes.variables import without_secrets
from megappo.rewards.processes.workers import Worker
from megappo.runtime.launchers import is_main
from megappo.types import CHAT_MESSAGES, Prompt

_PROGRAM = "megappo.environments.gateway.agent_worker"
_ARGUMENTS = "rollout.environment.arguments"


class AgentError(Exception):
    """A program of an agent has failed."""


class Agent:
    """Environment in which every episode is one run of an agent. Each episode has its own address of the model.

    `function` is an import path, called as `await function(endpoint, prompt, **options)` in the event loop of all
    episodes. Its result is a reward or None. `command` is a program with its arguments. `{prompt}` in an argument is
    replaced by the text of the task, which is also the standard input. The program finds the model through
    `AgentEndpoint.environment`, and returns no reward. The program gets the environment variables of the trainer,
    except secrets that are not listed in `variables`. A function that blocks the event loop should be a program
    instead.
    """

    role, serves = "tool", True

    def __init__(
        self,
        *,
        function: str = "",
        command: Sequence[str] = (),
        format: str = "qwen",
        options: Mapping[str, JSONValue] | None = None,
        variables: Sequence[str] = (),
    ) -> None:
        """Check the arguments. Raises ValueError if they do not specify an agent."""
        call_format(format, f"{_ARGUMENTS}.format")
        if bool(function) == bool(command):
            raise ValueError(f"{_ARGUMENTS} must contain either function or command of the agent; set one of them")
        for key, value, what in (("command", command, "texts"), ("variables", variables, "names")):
            if isinstance(value, str) or not all(isinstance(word, str) for word in value):
                raise ValueError(f"{_ARGUMENTS}.{key} is {show(value)}, must be a list of {what}; change it")
        self._variables = partial(without_secrets, but=frozenset(variables))
        self._format, self._command, self._options = format, list(map(home_expanded, command)), dict(options or {})
        setting = f"{_ARGUMENTS}.function"
        self._function = load(function, setting, inspect.iscoroutinefunction, "async function") if function else None
        if is_main(os.environ) and (problem := client_proxy_problem()):
            show_message(f"agents with OpenAI's or Anthropic's SDK will fail: {problem}", warns=True)

    async def run(self, session: Session) -> float | None:
        """See `Environment.run`."""
        async with session.serve(self._format) as endpoint:
            if self._function is not None:
                reward: float | None = await self._function(endpoint, session.prompt, **self._options)
                return reward
            await _run_program(self._command, endpoint, task_of(session.prompt), self._variables)
        return None


def task_of(prompt: Prompt) -> str:
    """Return the text of a prompt without its chat template: the text of the last message, or the whole prompt."""
    messages = prompt.metadata.get(CHAT_MESSAGES)
    return str(messages[-1]["content"]) if messages else prompt.text


def _word(word: str, task: str) -> str:
    """Return an argument of the command with the task filled in.

    Raises AgentError if the program would misinterpret the task, for example as an option.
    """
    if "{prompt}" not in word:
        return word
    if "\0" in task or (word.startswith("{prompt}") and task.startswith("-")):
        raise AgentError(
            f"the program would misinterpret the task {show(task)} as an argument; read the task from the standard "
            f"input of the program, and remove {{prompt}} from {_ARGUMENTS}.command"
        )
    return word.replace("{prompt}", task)


def _clear(worker: Worker, folder: TemporaryDirectory[str]) -> None:
    """Remove the folder of a program after all its processes have ended."""
    worker.wait()
    folder.cleanup()


async def _run_program(
    command: Sequence[str],
    endpoint: AgentEndpoint,
    task: str,
    variables: Callable[[Mapping[str, str]], dict[str, str]],
) -> None:
    """Run a program until it ends. Cancelling ends all processes of the program. Raises AgentError."""
    arguments = [_word(word, task) for word in command]
    folder = TemporaryDirectory(prefix="megappo-agent-", ignore_cleanup_errors=True)
    worker = Worker(AgentProgram(arguments, endpoint.environment, task, folder.name), _PROGRAM, variables)
    try:
        status, errors = await receive(worker, math.inf)
    except (EOFError, OSError, ForeignMessageError) as error:
        raise AgentError(f"the process that runs the agent has ended ({type(error).__name__})") from error
    finally:
        worker.hang_up()
        asyncio.get_running_loop().run_in_executor(None, _clear, worker, folder)
    if status:
        raise AgentError(f"'{arguments[0]}' ended with status {status}: {errors}")
