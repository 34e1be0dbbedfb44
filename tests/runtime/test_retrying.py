"""Retries of requests: pauses that double and vary, pauses that a server requests, and limits."""

from __future__ import annotations

import math
from email.message import Message

import pytest

from megappo.runtime.retrying import LONGEST_PAUSE_SECONDS, Tries, requested_pause


def test_pauses_double_and_vary() -> None:
    pauses = [Tries(math.inf).pause() or 0.0 for _ in range(64)]
    assert all(0.05 <= seconds <= 0.1 for seconds in pauses) and len(set(pauses)) > 1
    tries = Tries(math.inf)
    for longest in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[LONGEST_PAUSE_SECONDS] * 3):
        seconds = tries.pause()
        assert seconds is not None and longest / 2 <= seconds <= longest
    tries.begin_again(math.inf)
    assert tries.count == 0 and (tries.pause() or 1.0) <= 0.1


def test_retries_end_by_number_and_deadline() -> None:
    tries = Tries(math.inf, most=2)
    assert tries.pause() is not None and tries.pause() is None and tries.count == 2
    assert Tries(0.01).pause() is None, "the next attempt would be after the deadline"
    assert Tries(30).pause(29.5) == 29.5 and Tries(30).pause(31) is None, "the server requests the pause"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0.0),
        ({"retry-after": "7"}, 7.0),
        ({"Retry-After": "-7"}, 0.0),
        ({"Retry-After": "soon"}, 0.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT", "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 30.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:27:30 GMT", "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT"}, 0.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30", "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0),
    ],
)
def test_pause_requested_by_a_server(headers: dict[str, str], seconds: float) -> None:
    message = Message()
    for name, value in headers.items():
        message[name] = value
    assert requested_pause(message) == seconds and requested_pause(None) == 0.0
