"""The reward of the quickstart's sums."""

from __future__ import annotations

from megappo.observe.json_values import JSONValue


def answer_then_end(
    *,
    prompt: str,
    response: str,
    raw_response: str,
    answer: str,
    metadata: dict[str, JSONValue],
    end_token: str = "<eos>",
) -> float:
    """1 where the response, special tokens shown, is the answer and then the end token, and nothing else.

    Without special tokens `<pad>3`, cut at the length limit, is the answer 3 too, and a model learns never to stop.
    """
    return float(raw_response == answer + end_token)
