"""Turns of the model, results of tools, the limits of an episode, and errors of environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megappo.observe.ends import End

Limit = Literal["turns", "calls", "tokens", "positions"]
"""Limits of an episode: turns, tool calls, tokens of the response, and tokens of prompt and response together."""


LIMIT_ENDS: dict[Limit, End] = {
    "turns": End.OUT_OF_TURNS, "calls": End.OUT_OF_CALLS, "tokens": End.RESPONSE_LIMIT, "positions": End.POSITION_LIMIT,
}  # fmt: skip
"""End of an episode for each limit."""


@dataclass(frozen=True)
class Reply:
    """A turn of the model."""

    token_ids: tuple[int, ...]
    """Sampled tokens, including the stop token."""
    logprobs: tuple[float, ...]
    text: str
    """Text of the turn without special tokens."""
    raw_text: str
    truncated: bool
    """True if a limit of tokens ended the turn instead of a stop token."""
    weight_version: int


@dataclass(frozen=True)
class ToolResult:
    """Result of a tool call."""

    text: str
    failure: str
    """Kind of failure, one of `tool_worker.LIMITS`, or "" after success."""
    seconds: float
    """Duration in seconds, counted from the start of the call in a worker or the sandbox."""


class LimitReached(Exception):
    """The episode has used up its turns, tool calls or tokens."""

    def __init__(self, limit: Limit) -> None:
        """Raises ValueError for an unknown limit."""
        if limit not in LIMIT_ENDS:
            raise ValueError(f"the limit is {limit!r}, must be one of {', '.join(LIMIT_ENDS)}")
        self.limit: Limit = limit
        super().__init__(f"the episode has reached its limit of {self.unit}")

    @property
    def unit(self) -> str:
        """Unit of the limit for messages."""
        return "tokens" if self.limit == "positions" else self.limit


class NonsenseError(ValueError):
    """An environment returned or passed an invalid reward, token or end of an episode."""
