"""What a user sees of a run."""

from megappo.observe.advice import ADVICE, Advisor
from megappo.observe.console import View, curve, make_view, sparkline
from megappo.observe.metrics import MetricsLog, read_metrics
from megappo.observe.stopwatch import Lap, StageTimer

__all__ = [
    "ADVICE",
    "Advisor",
    "Lap",
    "MetricsLog",
    "StageTimer",
    "View",
    "curve",
    "make_view",
    "read_metrics",
    "sparkline",
]
