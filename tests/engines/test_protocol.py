"""Tests of the token limits of requests and rollouts."""

from __future__ import annotations

import pytest

from megappo.engines.protocol import GenerateRequest, SamplingParams

PARAMS = SamplingParams(1.0, max_new_tokens=8, stop_token_ids=(2,), min_new_tokens=3)


@pytest.mark.parametrize(
    ("most", "least", "expected"),
    [
        (None, None, (8, None, 3)),
        (8, 3, (8, 13, 3)),
        (7, None, (7, 12, 3)),
        (9, 4, (8, 14, 3)),
        (2, None, (2, 7, 2)),
        (0, 0, (0, 5, 0)),
    ],
)
def test_stricter_limit_applies(most: int | None, least: int | None, expected: tuple[int, int | None, int]) -> None:
    """The limit of prompt and response together comes only from the request."""
    request = GenerateRequest((5, 6, 7, 8, 9), 1, 0, most, least)
    assert (request.most_tokens(PARAMS), request.most_in_all, request.least_tokens(PARAMS)) == expected
