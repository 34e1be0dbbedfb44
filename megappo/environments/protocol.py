"""The protocol of an environment, and what it sees of a turn of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from megappo.observe.ends import End

if TYPE_CHECKING:
    from megappo.environments.session import Session

Limit = Literal["turns", "calls", "tokens", "positions"]
"""Limits of an episode: turns, tool calls, tokens of the response, and tokens of prompt and response together."""
LIMIT_ENDS: dict[Limit, End] = {
    "turns": End.OUT_OF_TURNS, "calls": End.OUT_OF_CALLS, "tokens": End.RESPONSE_LIMIT, "positions": End.POSITION_LIMIT,
}  # fmt: skip
"""The end of an episode that a limit ended."""


class Environment(Protocol):
    """An environment: the class that `rollout.environment.name` names, called with `rollout.environment.arguments`.

    It may also have, as attributes or properties:

        tools     {name: import path} of functions that `Session.use` calls in worker processes, with limits of time,
                  memory and processes for each call; they take keyword arguments and return a text
        programs  {name: argument} of those tools whose argument is a program in Python, which
                  `rollout.environment.tools.sandbox` runs in their place
        schemas   descriptions of its tools for the chat template (OpenAI's form), which prompts are rendered with
        role      of the messages that it observes as text, "user" where it says nothing
        serves    True where it uses `Session.serve`, which needs a chat template
    """

    async def run(self, session: Session) -> float | None:
        """Play one episode; all those of a rank run in one event loop.

        Returns a reward for the last turn besides what `Session.reward` gave, or None. `LimitReached` need not be
        caught: the episode then ends with the rewards that it has. Any other exception fails the sample, which is not
        trained on. Random draws should follow from `Session.seed`, so that a run can be repeated.
        """


@dataclass(frozen=True)
class Reply:
    """A turn of the model."""

    token_ids: tuple[int, ...]
    """Sampled tokens, the stop token included."""
    logprobs: tuple[float, ...]
    text: str
    """Text of the turn without special tokens."""
    raw_text: str
    truncated: bool
    """Whether a limit of tokens ended the turn, not a stop token."""
    weight_version: int


@dataclass(frozen=True)
class ToolResult:
    """Result of a call of a tool."""

    text: str
    failure: str
    """Kind of failure, one of `tool_worker.LIMITS`; "" where the call succeeded."""
    seconds: float
    """Duration, counted from when a worker or the sandbox took the call on."""


class LimitReached(Exception):
    """The episode has used up its turns, tool calls or tokens."""

    def __init__(self, limit: Limit) -> None:
        """Raises ValueError for a limit that episodes do not have."""
        if limit not in LIMIT_ENDS:
            raise ValueError(f"the limit is {limit!r}, must be one of {', '.join(LIMIT_ENDS)}")
        self.limit: Limit = limit
        super().__init__(f"the episode has reached its limit of {self.unit}")

    @property
    def unit(self) -> str:
        """What the limit counts, for people."""
        return "tokens" if self.limit == "positions" else self.limit


class NonsenseError(ValueError):
    """An environment gave something that is no reward, no token or no end of an episode."""
