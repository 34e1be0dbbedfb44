"""Deadlines of a run that follow from its plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from megappo.config import Config, ConfigError
from megappo.config.engine import LEAST_REQUEST_SECONDS
from megappo.config.schema import PHASES, RuntimeSettings
from megappo.runtime.deadlines import Deadlines

_OTHER_START_SECONDS = 300.0
"""Seconds of a start besides reading weights: importing libraries, the first compilations, making process groups."""
PLANNED_TIMES = 4.0
"""A phase may last so many times its planned seconds before the watchdog ends it, and a request of a rollout before its
server is asked whether it still makes tokens. Runs that were compared took 0.9 to 1.8 times their planned seconds
(benchmarks/results/2026-11-21-plan-published.md)."""
WATCHED_COLLECTIVE_SECONDS = 7 * 24 * 3600
"""Timeout of collectives where the watchdog ends what hangs: a week, so that it always comes later than the
watchdog."""
_MOST_SECONDS = 1e6
"""The largest limit, as of a setting of seconds."""


def planned_deadlines(config: Config, planned_seconds: Mapping[str, float]) -> Deadlines:
    """The deadlines that are given, and for others those that follow from the planned seconds of each phase, the
    rollout among them, and from how long the run's servers may take to start.

    Raises ConfigError where a collective that was given a timeout would fail in a phase that may last longer.
    """
    slow = {name: PLANNED_TIMES * seconds for name, seconds in planned_seconds.items()}
    slow["start"] = slow.get("start", 0.0) + _OTHER_START_SECONDS + _servers_start_seconds(config)
    slow = {name: min(seconds, _MOST_SECONDS) for name, seconds in slow.items()}
    found, limit = Deadlines.of(config.runtime), config.runtime.phase_timeout_seconds
    if limit is not None and "phase_timeout_seconds" not in config.runtime.model_fields_set:
        limits = {name: seconds for name, seconds in slow.items() if name in PHASES and seconds > limit}
        found = replace(found, of_phases=limits | config.runtime.phase_timeouts_seconds)
    if limit is not None:
        found = replace(found, collective_seconds=_collective_seconds(found, limit, config.runtime))
    given = config.rollout.servers.request_timeout_seconds if config.rollout.has_servers else None
    return replace(found, request_seconds=given or max(slow.get("rollout", 0.0), LEAST_REQUEST_SECONDS))


def _servers_start_seconds(config: Config) -> float:
    """Longest seconds until the run's own servers answer, started one after the other; each reports itself when it does
    not."""
    own = [judge.server for judge in config.reward.judges.values()] + [config.reward.model_server]
    of_rewards = math.fsum(server.start_timeout_seconds for server in own if server is not None)
    return of_rewards + (config.rollout.servers.start_timeout_seconds if config.rollout.has_servers else 0.0)


def _collective_seconds(found: Deadlines, limit: float, given: RuntimeSettings) -> float:
    """Timeout of collectives that outlasts the watchdog's limits. Only the watchdog decides what lasts too long: it
    sees tokens and minibatches arrive, which a collective does not."""
    if "collective_timeout_seconds" not in given.model_fields_set:
        return WATCHED_COLLECTIVE_SECONDS
    name, longest = max(found.of_phases.items(), key=lambda item: item[1], default=("step", 0.0))
    name, longest = (name, longest) if longest > limit else ("of a step", limit)
    if given.collective_timeout_seconds <= longest:
        raise ConfigError(
            f"runtime.collective_timeout_seconds is {given.collective_timeout_seconds}, but a phase ({name}) may "
            f"last {longest:g} seconds, in which other ranks wait; set it above, or remove it"
        )
    return given.collective_timeout_seconds
