"""Counts the failures of all ranks while rewards are computed. A run that ends because of them does not wait for the
other scores."""

from __future__ import annotations

import time
from collections.abc import Callable

from megappo.runtime.notices import Notices

_POLL_SECONDS = 1.0
_KEY = "megappo/reward"


class FailureLimit:
    """Limit of failures in one call of the scorer, which every rank makes. Ranks count in the store.

    The limit refers to the samples of all ranks. So it is exceeded on all ranks or on none, apart from the time at
    which they notice, and never before every rank has begun.
    """

    def __init__(self, notices: Notices, call: int, samples: int, fraction: float, *, ranks: int) -> None:
        """`call`: number of the call, the same on all ranks. `samples`: those of this rank. `fraction`: of all samples
        that may fail. `ranks`: number of all ranks."""
        self._notices, self._key, self._fraction, self._ranks = notices, f"{_KEY}-{call}", fraction, ranks
        notices.count(f"{self._key}/samples", samples)
        notices.count(f"{self._key}/ranks", 1)

    def of(self, function: str) -> Callable[[int], bool]:
        """For a reward function: whether all ranks together have too many failures, given this rank's number."""
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
