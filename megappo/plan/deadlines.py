"""Deadlines of a run that follow from its plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from megappo.config import Config, ConfigError
from megappo.config.schema import PHASES, RuntimeSettings
from megappo.config.sections.engine import LEAST_REQUEST_SECONDS
from megappo.runtime.watch.deadlines import Deadlines

_OTHER_START_SECONDS = 300.0
"""Startup time in seconds in addition to reading weights: imports, first compilations and creation of process
groups."""
PLANNED_TIMES = 4.0
"""Factor on planned times. The watchdog ends a phase that takes longer than this factor times its planned seconds. A
rollout request that takes longer triggers a progress check of its server. Measured runs took 0.9 to 1.8 times their
planned seconds (benchmarks/results/2026-11-21-plan-published.md)."""
WATCHED_COLLECTIVE_SECONDS = 7 * 24 * 3600
"""Timeout of collectives in seconds if the watchdog detects hangs. The timeout of a week is always longer than the
limits of the watchdog."""
_MOST_SECONDS = 1e6
"""Largest limit in seconds, equal to the maximum of a setting in seconds."""


def planned_deadlines(config: Config, planned_seconds: Mapping[str, float]) -> Deadlines:
    """Return the deadlines of a run.

    Deadlines that the configuration does not set are derived from the planned seconds of each phase (including the
    rollout) and from the time that the run's servers may take to start.

    Raises ConfigError if `runtime.collective_timeout_seconds` is not above the limit of every phase.
    """
    slow = {name: PLANNED_TIMES * seconds for name, seconds in planned_seconds.items()}
    slow["start"] = slow.get("start", 0.0) + _OTHER_START_SECONDS + _servers_start_seconds(config)
    slow = {name: min(seconds, _MOST_SECONDS) for name, seconds in slow.items()}
    deadlines, limit = Deadlines.of(config.runtime), config.runtime.phase_timeout_seconds
    if limit is not None and "phase_timeout_seconds" not in config.runtime.model_fields_set:
        limits = {name: seconds for name, seconds in slow.items() if name in PHASES and seconds > limit}
        deadlines = replace(deadlines, of_phases=limits | config.runtime.phase_timeouts_seconds)
    if limit is not None:
        deadlines = replace(deadlines, collective_seconds=_collective_seconds(deadlines, limit, config.runtime))
    has_servers = config.rollout.capabilities.separate_processes
    timeout = config.rollout.server_settings.request_timeout_seconds if has_servers else None
    return replace(deadlines, request_seconds=timeout or max(slow.get("rollout", 0.0), LEAST_REQUEST_SECONDS))


def _servers_start_seconds(config: Config) -> float:
    """Return the longest time in seconds until the run's own servers respond. The servers start in sequence.
    A server that exceeds its start timeout reports the failure itself."""
    of_rewards = math.fsum(server.start_timeout_seconds for _, server in config.reward.own_servers.values())
    has_servers = config.rollout.capabilities.separate_processes
    return of_rewards + (config.rollout.server_settings.start_timeout_seconds if has_servers else 0.0)


def _collective_seconds(deadlines: Deadlines, limit: float, settings: RuntimeSettings) -> float:
    """Return a collective timeout above all limits of the watchdog.

    Only the watchdog should end a phase, because the watchdog observes progress in tokens and minibatches. A
    collective cannot observe progress.

    Raises ConfigError if the configured timeout is too short.
    """
    if "collective_timeout_seconds" not in settings.model_fields_set:
        return WATCHED_COLLECTIVE_SECONDS
    name, longest = max(deadlines.of_phases.items(), key=lambda item: item[1], default=("step", 0.0))
    name, longest = (name, longest) if longest > limit else ("of a step", limit)
    if settings.collective_timeout_seconds <= longest:
        raise ConfigError(
            f"runtime.collective_timeout_seconds is {settings.collective_timeout_seconds}, but a phase ({name}) may "
            f"last {longest:g} seconds, in which other ranks wait; set it above this limit, or remove it"
        )
    return settings.collective_timeout_seconds
