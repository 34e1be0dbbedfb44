"""When a server is asked again: one policy for whatever speaks HTTP."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from email.message import Message
from email.utils import parsedate_to_datetime

TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))
"""HTTP's codes after which another try may help."""
LONGEST_PAUSE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.1
_CHANCE = random.SystemRandom()
"""Its own, as a run goes on with the states of all others."""


class Tries:
    """Those of one request, until a deadline or so many times.

    Pauses double. Each is drawn from the upper half of what it may be, as those whom a server refused together would
    come back together; none is shorter than what the server asks for.
    """

    def __init__(self, deadline_seconds: float, most: float = math.inf) -> None:
        self._most = most
        self.begin_again(deadline_seconds)

    def begin_again(self, deadline_seconds: float) -> None:
        """Neither tries nor time count that were before."""
        self.count, self._deadline, self._pause = 0, time.monotonic() + deadline_seconds, _FIRST_PAUSE_SECONDS

    @property
    def seconds_left(self) -> float:
        """Until the deadline; negative behind it."""
        return self._deadline - time.monotonic()

    def pause(self, asked_seconds: float = 0.0) -> float | None:
        """Count a try that failed; seconds until the next one, None where there is to be none."""
        self.count += 1
        seconds = max(_CHANCE.uniform(self._pause / 2, self._pause), asked_seconds)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return None if self.count >= self._most or seconds >= self.seconds_left else seconds


def asked_pause(headers: Mapping[str, str] | Message | None) -> float:
    """Seconds for which a server asks not to be tried (`Retry-After`, as seconds or as a date); 0 where it does not."""
    text, date = ("", "") if headers is None else (headers.get(name) or "" for name in ("Retry-After", "Date"))
    if text.strip().isdecimal():
        return float(text)
    try:  # both by the server's clock
        until, now = parsedate_to_datetime(text), parsedate_to_datetime(date)
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):  # none, no date, or one without its zone
        return 0.0
