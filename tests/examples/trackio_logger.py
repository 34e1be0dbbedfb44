"""Metrics and texts in Trackio: `logging.loggers: {"tests.examples.trackio_logger:Trackio": {project: sums}}`."""

from __future__ import annotations

from typing import Any

import trackio


class Trackio:
    """A custom logger. Loggers for MLflow and SwanLab differ only in three calls."""

    def __init__(self, *, directory: Any, run_name: str, config: Any, project: str) -> None:
        trackio.init(project=project, name=run_name, config=config, resume="allow")

    def log(self, step: int, metrics: Any) -> None:
        trackio.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Any) -> None:  # optional
        trackio.log({"samples": "\n\n".join(f"{s['prompt']} -> {s['response']}" for s in samples)}, step=step)

    def forget_after(self, step: int) -> None:
        """Ignore the repeated steps of a continued run. Trackio keeps both versions."""

    def close(self) -> None:
        trackio.finish()
