"""Environments and rewards of a user that fail, or never reward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reward workers import this file, and need no more
    from megappo.environments.session import Session


class Fails:
    """Fails in one of the ways in which an episode can."""

    def __init__(self, how: str = "raised") -> None:
        self._how = how

    async def run(self, session: Session) -> Any:
        """See `Environment.run`."""
        if self._how != "without a turn":
            await session.generate()
        if self._how == "nonsense":
            return "very good"
        if self._how == "raised":
            raise KeyError("no such room")
        return None


def fussy(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """Cannot score half of the sums."""
    if int(prompt[0]) % 2:
        return parsed(response, prompt)
    return float(response == answer)


def parsed(response: str, prompt: str) -> float:
    """Always fails."""
    raise ValueError(f"cannot read {prompt}")


def zero(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """A reward that never rewards."""
    return 0.0


def crashing(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """A reward that always fails."""
    raise KeyError("no such thing")
