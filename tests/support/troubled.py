"""Environments and rewards of a user that fail or are always zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reward workers import this file without megappo
    from megappo.environments.session import Session


class Fails:
    """An environment that fails in one of the possible ways."""

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
    """Score the response, but fail for half of the sums."""
    if int(prompt[0]) % 2:
        return parsed(response, prompt)
    return float(response == answer)


def parsed(response: str, prompt: str) -> float:
    """Raise an error in every call."""
    raise ValueError(f"cannot read {prompt}")


def zero(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """Return zero."""
    return 0.0


def crashing(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """Raise an error."""
    raise KeyError("no such thing")
