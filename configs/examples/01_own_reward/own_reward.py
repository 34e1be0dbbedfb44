"""A reward that falls with the distance of the answer from the right number."""

from __future__ import annotations


def distance(response: str, answer: str) -> float:
    """Return 1 for the right number, less for other numbers, and 0 for text that is not a number.

    The arguments are selected by name. `prompt` and `metadata` (a dictionary) are also available.
    """
    text = response.strip()
    return 1 / (1 + abs(int(text) - int(answer))) if text.isdecimal() else 0.0
