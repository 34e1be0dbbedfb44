"""A custom reward of a user in a separate file. Reward workers import only this file."""

from __future__ import annotations

from typing import Any


def digits(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """Return the number of digits in the response, divided by 3."""
    return sum(character.isdigit() for character in response) / 3
