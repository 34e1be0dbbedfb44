"""Supervise one standalone server. The server is restarted after a crash or a hang until a stop signal arrives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from megappo.engines.sglang.client import ServerFailure, is_alive
from megappo.engines.sglang.servers.server import Server
from megappo.errors import RunError
from megappo.observe.terminal.messages import show_message

POLL_SECONDS = 0.2
_HEALTH_SECONDS = 10.0


class Ending(Protocol):
    """Signal to stop."""

    @property
    def due(self) -> bool:
        """Whether to stop now."""

    def wait(self, seconds: float) -> bool | None:
        """Sleep for `seconds`, or until `due`."""


def keep_running(start: Callable[[int], Server | None], ending: Ending, patience_seconds: float) -> None:
    """Keep a server running, with at most `max_restarts` restarts. Raises RunError after the last restart, or if the
    server fails to become ready twice in a row.

    `start` receives the number of earlier starts, and returns None if a stop signal arrived. A server without a
    response for `patience_seconds` counts as hung.
    """
    restarts = never_ready = 0
    while not ending.due:
        server = start(restarts)
        if server is None:
            return
        try:
            ready, reason = _watch(server, ending, patience_seconds)
            if reason is not None:
                server.notify_parts(f"ended: {reason}")
        finally:
            server.stop()
        if reason is None:
            return
        never_ready = 0 if ready else never_ready + 1
        most = server.settings.max_restarts
        if restarts == most or never_ready == 2:
            raise RunError(f"{reason}; the server was started {restarts + 1} times ({server.key}.max_restarts {most})")
        restarts += 1
        show_message(f"{reason}; it is started again")


def _watch(server: Server, ending: Ending, patience_seconds: float) -> tuple[bool, str | None]:
    """Watch a server. Returns whether the server became ready, and the reason for a restart, or None to stop."""
    ready = False
    try:
        while not ending.due and not (ready := server.is_ready()):
            ending.wait(POLL_SECONDS)
    except ServerFailure as failure:
        return False, str(failure)
    if ready:
        show_message(f"{server.endpoint.name} is ready, its log is {server.log}")
    answered = time.monotonic()
    next_question = answered + _HEALTH_SECONDS
    while not ending.due:
        if not server.running:
            return ready, f"{server.endpoint.name} died; {server.why_ended}"
        now = time.monotonic()
        if now >= next_question:
            if is_alive(server.endpoint, _HEALTH_SECONDS):
                answered = now
            elif now - answered > patience_seconds:
                return ready, f"{server.endpoint.name} has not answered for {now - answered:.0f} seconds"
            next_question = time.monotonic() + _HEALTH_SECONDS
        ending.wait(POLL_SECONDS)
    return ready, None
