"""Contents of the only TensorBoard file of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_events(run: Path) -> Any:
    """Return the accumulator of TensorBoard for a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return events


def scalars(run: Path, name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric."""
    return [(event.step, event.value) for event in read_events(run).Scalars(name)]
