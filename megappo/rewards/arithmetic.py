"""Reward of the arithmetic problems of the quickstart."""

from __future__ import annotations

from megappo.files.json_values import JSONValue


def answer_then_end(
    *,
    prompt: str,
    response: str,
    raw_response: str,
    answer: str,
    metadata: dict[str, JSONValue],
    end_token: str = "<eos>",
) -> float:
    """Return 1 if the response with special tokens is exactly the answer followed by the end token, otherwise 0.

    Without special tokens, `<pad>3` cut at the length limit would be the answer 3 too. A model would then never learn
    to stop.
    """
    return float(raw_response == answer + end_token)
