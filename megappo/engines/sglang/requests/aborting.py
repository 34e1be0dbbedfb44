"""Abort the requests on all servers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megappo.config.sections.engine import ServerSettings
from megappo.engines.sglang.client import Endpoint, failures_of
from megappo.engines.sglang.requests.dispatch import Dispatcher
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.runtime.waiting import wait_until

_ABORT_SECONDS = 0.1
"""Seconds between two abort calls. The second call reaches requests that were in transit during the first call."""


def abort_servers(dispatcher: Dispatcher, mine: Sequence[Endpoint], settings: ServerSettings) -> dict[int, str]:
    """Abort all requests on all servers until no rank waits for an answer. All ranks call this function.

    Args:
        dispatcher: Requests of this rank, after `Dispatcher.abort`.
        mine: Servers to which this rank sends the abort.

    Returns the problems by server, the same on every rank.
    """
    failed, quiet = dict[int, str](), 0
    deadline = time.monotonic() + settings.sync_timeout_seconds
    while True:
        remaining = [endpoint for endpoint in mine if endpoint.index not in failed]
        # /pause_generation with mode abort is not used, because SGLang then checks only once a second whether
        # requests are gone (SGLang 0.5.23, tokenizer_manager.py:2280).
        failed |= failures_of(remaining, "/abort_request", {"abort_all": True}, settings.health_timeout_seconds)
        busy = [endpoint for endpoint in dispatcher.busy if endpoint.index not in failed]
        if time.monotonic() > deadline:
            failed |= {e.index: f"{e.name} did not return its requests after an abort" for e in busy}
        facts = all_gather_objects((failed, len(busy)))
        failed = {index: reason for of_rank, _ in facts for index, reason in of_rank.items()}
        quiet = 0 if any(count for _, count in facts) else quiet + 1
        if quiet == 2:  # a request in transit during the first pass is visible in the second pass
            return failed
        wait_until(lambda: not dispatcher.busy, _ABORT_SECONDS, every_seconds=_ABORT_SECONDS / 10)
