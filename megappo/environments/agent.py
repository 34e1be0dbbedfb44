"""Trains an unchanged agent that speaks HTTP: `rollout.environment.name: agent`, a function of asyncio or a program."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from tempfile import TemporaryDirectory

from megappo.environments.agent_worker import AgentProgram
from megappo.environments.gateway.server import AgentEndpoint
from megappo.environments.session import Session
from megappo.environments.tool_calls import call_format
from megappo.environments.tool_pool import receive
from megappo.errors import home_expanded, show
from megappo.network.proxies import client_proxy_problem
from megappo.observe.json_values import JSONValue
from megappo.observe.messages import tell
from megappo.plugins import load
from megappo.rewards.channel import ForeignMessageError
from megappo.rewards.variables import without_secrets
from megappo.rewards.workers import Worker
from megappo.runtime.launchers import is_main
from megappo.types import CHAT_MESSAGES, Prompt

_PROGRAM = "megappo.environments.agent_worker"
_ARGUMENTS = "rollout.environment.arguments"


class AgentError(Exception):
    """A program of an agent has failed."""


class Agent:
    """Environment in which every episode is one run of an agent, which finds the model at an address of its own.

    `function` is an import path, called as `await function(endpoint, prompt, **options)` in the event loop of all
    episodes; what it returns is a reward, or None. `command` is a program with its arguments, in which `{prompt}`
    stands for the task's text, which is its standard input too. It finds the model through `AgentEndpoint.environment`
    and gives no reward. It gets the trainer's variables except those with names of secrets that `variables` does not
    names. A function that blocks the event loop should be a program instead.
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
        """Check the arguments. Raises ValueError where they name no agent."""
        call_format(format, f"{_ARGUMENTS}.format")
        if bool(function) == bool(command):
            raise ValueError(f"{_ARGUMENTS} has to name either the agent's function or its command; set one of them")
        for key, given, what in (("command", command, "texts"), ("variables", variables, "names")):
            if isinstance(given, str) or not all(isinstance(word, str) for word in given):
                raise ValueError(f"{_ARGUMENTS}.{key} is {show(given)}, must be a list of {what}; change it")
        self._variables = partial(without_secrets, but=frozenset(variables))
        self._format, self._command, self._options = format, list(map(home_expanded, command)), dict(options or {})
        setting = f"{_ARGUMENTS}.function"
        self._function = load(function, setting, inspect.iscoroutinefunction, "async function") if function else None
        if is_main(os.environ) and (problem := client_proxy_problem()):
            tell(f"agents with OpenAI's or Anthropic's SDK will fail: {problem}", warns=True)

    async def run(self, session: Session) -> float | None:
        """See `Environment.run`."""
        async with session.serve(self._format) as endpoint:
            if self._function is not None:
                reward: float | None = await self._function(endpoint, session.prompt, **self._options)
                return reward
            await _run_program(self._command, endpoint, task_of(session.prompt), self._variables)
        return None


def task_of(prompt: Prompt) -> str:
    """The text of a prompt without its chat template: that of the last message, or the whole prompt."""
    messages = prompt.metadata.get(CHAT_MESSAGES)
    return str(messages[-1]["content"]) if messages else prompt.text


def _word(word: str, task: str) -> str:
    """An argument of the command with the task filled in. Raises AgentError where the program would take the task for
    something else, such as an option."""
    if "{prompt}" not in word:
        return word
    if "\0" in task or (word.startswith("{prompt}") and task.startswith("-")):
        raise AgentError(
            f"the task {show(task)} as an argument would be taken for something else; have the program read it from "
            f"its standard input, and remove {{prompt}} from {_ARGUMENTS}.command"
        )
    return word.replace("{prompt}", task)


def _clear(worker: Worker, folder: TemporaryDirectory[str]) -> None:
    """Remove the folder of a program when nothing that it started is left."""
    worker.wait()
    folder.cleanup()


async def _run_program(
    command: Sequence[str],
    endpoint: AgentEndpoint,
    task: str,
    variables: Callable[[Mapping[str, str]], dict[str, str]],
) -> None:
    """Run a program until it ends. Cancelling ends it with everything that it started. Raises AgentError."""
    words = [_word(word, task) for word in command]
    folder = TemporaryDirectory(prefix="megappo-agent-", ignore_cleanup_errors=True)
    worker = Worker(AgentProgram(words, endpoint.environment, task, folder.name), _PROGRAM, variables)
    try:
        status, told = await receive(worker, math.inf)
    except (EOFError, OSError, ForeignMessageError) as error:
        raise AgentError(f"the process that runs the agent is gone ({type(error).__name__})") from error
    finally:
        worker.hang_up()
        asyncio.get_running_loop().run_in_executor(None, _clear, worker, folder)
    if status:
        raise AgentError(f"'{words[0]}' ended with status {status}: {told}")
