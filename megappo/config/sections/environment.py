"""Settings of multi-turn episodes (`rollout.environment`), and their rules with other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from megappo.config.base import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Processes, Seconds, Settings, Text
from megappo.plugins import check_choice

if TYPE_CHECKING:
    pass

SINGLE_TURN = "single_turn"
ENVIRONMENTS = {
    SINGLE_TURN: "",
    "tools": "megappo.environments.tool_calling:ToolCalling",
    "guess": "megappo.environments.guess:GuessNumber",
    "reasoning_gym": "megappo.environments.reasoning:ReasoningGym",
    "agent": "megappo.environments.gateway.agent:Agent",
}
"""Values of `rollout.environment.name` and their import paths (see `megappo.environments.protocol`)."""


class SandboxSettings(Settings):
    url: Text
    """Address of a service with SandboxFusion's protocol, such as `http://10.0.0.7:8080`. `/run_code` is appended."""
    concurrent: PositiveInt = 16
    """Maximum number of programs of a rank that run in the service at the same time."""
    retries: NonNegativeInt = 3
    """Maximum number of retries if the service fails or does not answer."""
    deadline_seconds: Seconds = 60.0
    """Maximum duration of a call including retries. The sample of a call above the limit fails."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"'{url}' is not an address of a service; write http://HOST:PORT")
        return url


class ToolSettings(Settings):
    workers: Processes = 4
    """Number of worker processes per rank. Each worker runs one call at a time."""
    timeout_seconds: Seconds = 10.0
    """Maximum duration of a call. All processes of the call are killed at the limit."""
    memory_gigabytes: PositiveFloat = 1.0
    """Maximum memory (GB, 1e9 bytes) of all processes of a call."""
    processes: PositiveInt = 16
    """Maximum number of concurrent processes of a call."""
    output_characters: int = Field(default=4000, gt=0, le=16000)
    """Maximum length of a result. A longer result is cut in its middle."""
    confined: bool = True
    """Whether programs of the model are confined by Landlock and seccomp of Linux: a separate writable folder, read
    access to the interpreter and system programs, no network. A run does not start if either feature is missing."""
    sandbox: SandboxSettings | None = None
    """Service over HTTP that runs the programs of the model, instead of workers on this machine. `timeout_seconds` and
    `memory_gigabytes` apply in the service too."""


class EnvironmentSettings(Settings):
    name: Text = SINGLE_TURN
    """Environment. `single_turn`: one prompt and one response. `tools`: the model can call a calculator or Python.
    `guess`: the model guesses a number with hints. `reasoning_gym`: several attempts at its tasks. `agent`: a function
    or program with the protocol of OpenAI or Anthropic. `file.py:Class` or
    `package.module:Class`: a custom environment."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: PositiveInt = 8
    """Maximum number of model turns in an episode. The episode ends after the last turn."""
    max_calls: NonNegativeInt = 16
    """Maximum number of tool calls in an episode. The episode ends if the model makes more calls."""
    max_turn_tokens: PositiveInt | None = None
    """Maximum length of a turn. Default: the remainder of `rollout.max_response_tokens`, which applies to all turns
    and to the texts of the environment between the turns. A turn cut at this limit does not end the episode."""
    max_seconds: Seconds = 60.0
    """Maximum time of an episode in its environment, without engine and tools. A longer episode counts as hanging and
    fails."""
    max_failure_fraction: Fraction = 0.5
    """Maximum fraction of failed episodes of a step. The run stops above this fraction."""
    tools: ToolSettings = ToolSettings()
    """Worker processes of the environment's tools."""
    gateway_host: Text = "127.0.0.1"
    """Address of this machine at which agents reach the model over HTTP on a free port. Each episode has a separate
    key. Agents on other machines can connect if the address is not loopback."""

    @field_validator("gateway_host")
    @classmethod
    def _is_one_interface(cls, host: str) -> str:
        if host in ("0.0.0.0", "::", "*"):
            raise ValueError(f"'{host}' means every address of the machine; set a single address for agents")
        return host

    @field_validator("name")
    @classmethod
    def _environment_is_known(cls, name: str) -> str:
        check_choice(name, ENVIRONMENTS)
        return name
