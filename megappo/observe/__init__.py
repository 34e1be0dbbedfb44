"""What a user sees of a run."""

from megappo.observe.advice import ADVICE, Advisor
from megappo.observe.charts import curve, sparkline
from megappo.observe.console import View, make_view
from megappo.observe.metric_docs import METRICS, MetricDoc, describe_metric, markdown_table
from megappo.observe.metrics import MetricsLog, read_metrics
from megappo.observe.stopwatch import Lap, StageTimer
from megappo.observe.stragglers import Stragglers
from megappo.observe.throughput import PEAK_FLOPS, mfu, peak_flops, training_flops_per_token

__all__ = [
    "ADVICE",
    "METRICS",
    "PEAK_FLOPS",
    "Advisor",
    "Lap",
    "MetricDoc",
    "MetricsLog",
    "StageTimer",
    "Stragglers",
    "View",
    "curve",
    "describe_metric",
    "make_view",
    "markdown_table",
    "mfu",
    "peak_flops",
    "read_metrics",
    "sparkline",
    "training_flops_per_token",
]
