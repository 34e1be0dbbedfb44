"""Limit of failed rewards over all ranks during the computation of rewards. A run that exceeds the limit ends without
the remaining scores."""

from __future__ import annotations

import time
from collections.abc import Callable

from megappo.runtime.watch.notices import Notices

_POLL_SECONDS = 1.0
_KEY = "megappo/reward"


class FailureLimit:
    """Limit of failures in one call of the scorer on all ranks. The store holds the counts.

    The limit is a fraction of the samples of all ranks. If one rank exceeds the limit, all ranks exceed the limit,
    within the interval of two queries. The limit applies after all ranks have started the call.
    """

    def __init__(self, notices: Notices, call: int, samples: int, fraction: float, *, ranks: int) -> None:
        """`call`: number of the call, which is equal on all ranks. `samples`: number of samples of this rank.
        `fraction`: largest fraction of failed samples. `ranks`: number of ranks."""
        self._notices, self._key, self._fraction, self._ranks = notices, f"{_KEY}-{call}", fraction, ranks
        notices.count(f"{self._key}/samples", samples)
        notices.count(f"{self._key}/ranks", 1)

    def of(self, function: str) -> Callable[[int], bool]:
        """Return a function that checks the limit for a reward function. Its argument is the number of failures on
        this rank. The result is true if all ranks together exceed the limit."""
        key, posted, polled = f"{self._key}/failures/{function}", 0, -_POLL_SECONDS

        def are_too_many(failures: int) -> bool:
            nonlocal posted, polled
            if failures == posted and time.monotonic() < polled + _POLL_SECONDS:
                return False
            total = self._notices.count(key, failures - posted)
            posted, polled = failures, time.monotonic()
            if self._notices.count(f"{self._key}/ranks") < self._ranks:
                return False
            return total > self._fraction * self._notices.count(f"{self._key}/samples")

        return are_too_many
