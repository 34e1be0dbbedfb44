"""Retry policy of failed requests for all HTTP clients."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from email.message import Message
from email.utils import parsedate_to_datetime

TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504, *range(520, 525), 529))
"""HTTP status codes of requests that are retried, including codes of proxies (520 to 524) and 529 (overloaded)."""
LONGEST_PAUSE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.1
_CHANCE = random.SystemRandom()
"""Separate generator: checkpoints restore the states of all other generators, and pauses need not be reproducible."""


class Tries:
    """The attempts of one request, until a deadline or a maximum number.

    The range of the pauses doubles after each attempt. Each pause is drawn from the upper half of its range. Otherwise
    clients that a server refused together would retry at the same time. No pause is shorter than the server requests.
    """

    def __init__(self, deadline_seconds: float, most: float = math.inf) -> None:
        self._most = most
        self.begin_again(deadline_seconds)

    def begin_again(self, deadline_seconds: float) -> None:
        """Reset the number of attempts and the deadline."""
        self.count, self._deadline, self._pause = 0, time.monotonic() + deadline_seconds, _FIRST_PAUSE_SECONDS

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._deadline - time.monotonic()

    def pause(self, least_seconds: float = 0.0) -> float | None:
        """Count a failed attempt. Returns the seconds until the next attempt, or None if there is no further
        attempt."""
        self.count += 1
        seconds = max(_CHANCE.uniform(self._pause / 2, self._pause), least_seconds)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return None if self.count >= self._most or seconds >= self.seconds_left else seconds


def requested_pause(headers: Mapping[str, str] | Message | None) -> float:
    """Return the pause in seconds that a server requests (`Retry-After`, in seconds or as a date), by default 0."""
    text, date = ("", "") if headers is None else (headers.get(name) or "" for name in ("Retry-After", "Date"))
    if text.strip().isdecimal():
        return float(text)
    try:  # the difference of two times on the clock of the server
        until, now = parsedate_to_datetime(text), parsedate_to_datetime(date)
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):  # a missing or invalid date, or a date without a time zone
        return 0.0
