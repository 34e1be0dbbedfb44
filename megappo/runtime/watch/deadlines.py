"""Time limits after which parts of a run are considered hung."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megappo.config.schema import RuntimeSettings
from megappo.config.sections.engine import LEAST_REQUEST_SECONDS


@dataclass(frozen=True)
class Deadlines:
    """Limits in seconds, from the settings and from a plan."""

    collective_seconds: float
    """Timeout of collectives."""
    phase_seconds: float | None
    """Default limit of a phase; None: phases have no limit."""
    of_phases: Mapping[str, float] = field(default_factory=dict)
    """Limits of individual phases, which replace the default."""
    request_seconds: float = LEAST_REQUEST_SECONDS
    """Time without a response after which the state of a request is queried at the server."""

    @classmethod
    def of(cls, settings: RuntimeSettings) -> Deadlines:
        """Return the limits of the settings, without a plan."""
        limits = settings.phase_timeouts_seconds
        return cls(settings.collective_timeout_seconds, settings.phase_timeout_seconds, limits)
