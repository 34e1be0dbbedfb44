"""Settings of episodes of several turns (`rollout.environment`), and their rules with other sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from megappo.config.base import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Processes, Seconds, Settings, Text
from megappo.plugins import check_choice

if TYPE_CHECKING:
    from megappo.config.schema import Config

SINGLE_TURN = "single_turn"
ENVIRONMENTS = {
    SINGLE_TURN: "",
    "tools": "megappo.environments.tool_calling:ToolCalling",
    "guess": "megappo.environments.guess:GuessNumber",
    "reasoning_gym": "megappo.environments.reasoning:ReasoningGym",
    "agent": "megappo.environments.agent:Agent",
}
"""Names for `rollout.environment.name`, and the import path of each; `megappo.environments.protocol` says what
they are."""


class SandboxSettings(Settings):
    url: Text
    """Where a service of SandboxFusion's protocol listens, such as `http://10.0.0.7:8080`; `/run_code` is added."""
    concurrent: PositiveInt = 16
    """Programs of a rank that the service runs at the same time."""
    retries: NonNegativeInt = 3
    """How often the service is asked again where it fails or does not answer."""
    deadline_seconds: Seconds = 60.0
    """Longest time of a call, retries included, after which the sample fails."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"'{url}' is no address of a service; write http://HOST:PORT")
        return url


class ToolSettings(Settings):
    workers: Processes = 4
    """Worker processes per rank, each of which runs one call at a time."""
    timeout_seconds: Seconds = 10.0
    """Longest time of a call; then all processes that it started are killed."""
    memory_gigabytes: PositiveFloat = 1.0
    """Most memory (GB, 1e9 bytes) of a call, all its processes together."""
    processes: PositiveInt = 16
    """Most processes of a call at the same time."""
    output_characters: int = Field(default=4000, gt=0, le=16000)
    """A longer result is cut in its middle."""
    confined: bool = True
    """Programs that the model writes get a folder of their own to write in, the interpreter and the system's programs
    to read, and no network, by Linux's Landlock and seccomp. A run does not start where these are missing."""
    sandbox: SandboxSettings | None = None
    """Run the programs that the model writes in a service over HTTP, instead of in workers of this machine.
    `timeout_seconds` and `memory_gigabytes` hold for them there."""


class EnvironmentSettings(Settings):
    name: Text = SINGLE_TURN
    """`single_turn`: a prompt and a response. `tools`: a model that may call a calculator, or Python. `guess`: a number
    is guessed with hints. `reasoning_gym`: its tasks in several tries. `agent`: a function or a program that speaks
    OpenAI's or Anthropic's protocol. Or one of your own: `package.module:Class`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: PositiveInt = 8
    """Most turns of the model in an episode; it ends after them."""
    max_calls: NonNegativeInt = 16
    """Most calls of tools in an episode; it ends where the model wants more."""
    max_turn_tokens: PositiveInt | None = None
    """Longest turn; default: what is left of `rollout.max_response_tokens`, which holds for all turns and what the
    environment says between them together. A turn that is cut here does not end the episode."""
    max_seconds: Seconds = 60.0
    """Longest time of an episode in its environment, engine and tools aside; an episode that takes longer counts as
    hanging and has failed."""
    max_failure_fraction: Fraction = 0.5
    """The run stops when more than this fraction of a step's episodes failed."""
    tools: ToolSettings = ToolSettings()
    """Worker processes of the environment's tools."""
    gateway_host: Text = "127.0.0.1"
    """The address of this machine at which agents reach the model over HTTP, each episode with a key of its own, on a
    free port. An address other than loopback lets agents on other machines connect."""

    @field_validator("gateway_host")
    @classmethod
    def _is_one_interface(cls, host: str) -> str:
        if host in ("0.0.0.0", "::", "*"):
            raise ValueError(f"'{host}' is every address of the machine; name the one that agents shall use")
        return host

    @field_validator("name")
    @classmethod
    def _environment_is_known(cls, name: str) -> str:
        check_choice(name, ENVIRONMENTS)
        return name


def environment_rules(config: Config) -> Iterator[str]:
    """Rules on what episodes need of the other settings."""
    rollout, function = config.rollout, config.reward.function
    environment = rollout.episodes
    if environment is None:
        if function == "environment":
            yield (
                "reward.function is environment, but rollout.environment names none that rewards; "
                "set rollout.environment.name, or another reward.function"
            )
        return
    most = environment.max_turn_tokens
    if most is not None and most > rollout.max_response_tokens:
        yield (
            f"rollout.environment.max_turn_tokens {most} is above rollout.max_response_tokens "
            f"{rollout.max_response_tokens}, which holds for all turns together; set at most that"
        )
