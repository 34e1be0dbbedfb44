"""Search for the known name that a misspelt name stands for."""

from __future__ import annotations

from collections.abc import Iterable

from megappo.errors import nearest_choices, nearest_word

_WHOLE, _PART, _WORD = 0.85, 0.6, 0.7
"""Minimum similarity (difflib's ratio) of names that differ by a typo, of candidates, and of words in two names."""
SHORTEST = 5
"""Smallest length of a name for a search in all sections. One letter changes a shorter word: `type` and `dtype`."""


def misspelt_word(name: str, known: Iterable[str], shortest: int = 0) -> str | None:
    """Return the known name that `name` stands for, or None if no known name is similar enough.

    Names that differ by more than a typo must share words. All words of `name` must match. One word may be different if
    two or more words match. `critic_lr` does not match `critic`, but `max_response_len` matches `max_response_tokens`.
    Names shorter than `shortest` have no match.
    """
    if len(name) < shortest:
        return None
    for candidate in nearest_choices(name, known, 5, cutoff=_PART):
        candidate_parts = candidate.split("_")
        own = [word for word in name.lower().split("_") if word]
        fitting = sum(nearest_word(word, candidate_parts, cutoff=_WORD) is not None for word in own)
        fits = fitting == len(own) or (fitting >= 2 and fitting == len(own) - 1)
        if fits or nearest_word(name, [candidate], cutoff=_WHOLE):
            return candidate
    return None
