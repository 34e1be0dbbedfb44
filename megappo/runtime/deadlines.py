"""How long parts of a run may last before they count as hung."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megappo.config.engine import LEAST_REQUEST_SECONDS
from megappo.config.schema import RuntimeSettings


@dataclass(frozen=True)
class Deadlines:
    """Limits in seconds: those that the settings give, and those that follow from a plan."""

    collective_seconds: float
    """Timeout of collectives."""
    phase_seconds: float | None
    """Limit of a phase that has none of its own; None: no phase is watched."""
    of_phases: Mapping[str, float] = field(default_factory=dict)
    """Limits of phases that have one of their own."""
    request_seconds: float = LEAST_REQUEST_SECONDS
    """A server that has not answered a request for so long is asked whether it works on it."""

    @classmethod
    def of(cls, settings: RuntimeSettings) -> Deadlines:
        """The limits that the settings give, without a plan."""
        limits = settings.phase_timeouts_seconds
        return cls(settings.collective_timeout_seconds, settings.phase_timeout_seconds, limits)
