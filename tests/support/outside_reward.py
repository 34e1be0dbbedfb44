"""A reward that a user may bring along, in a file of its own: its workers import it and nothing else."""

from __future__ import annotations

from typing import Any


def digits(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """How many characters of a response are digits."""
    return sum(character.isdigit() for character in response) / 3
