"""At most `checkpoint.every_minutes` minutes of training can be lost."""

from __future__ import annotations

import pytest

from megappo.checkpoint.clock import Clock, Deadline
from megappo.config.schema import CheckpointSettings


def saved_at(step_minutes: list[float], every_minutes: float | None) -> list[float]:
    """Return the minutes at which a run with steps of these lengths writes checkpoints. Writing takes no time."""
    clock, now, times = Clock(every_minutes, 0.0), 0.0, []
    for minutes in step_minutes:
        now += 60 * minutes
        if clock.is_late(now):
            clock.restart(now)
            times.append(now / 60)
    return times


@pytest.mark.parametrize("minutes", [1.0, 7.0, 25.0, 29.0, 31.0, 50.0])
def test_loss_of_a_killed_run_is_bounded(minutes: float) -> None:
    """The checkpoint is written before the step that would exceed the bound."""
    times = saved_at([minutes] * 200, 60.0)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert max(gaps) <= 60.0
    assert min(gaps) > 60.0 - 2 * minutes, "checkpoints are too frequent"
    assert 200 * minutes - times[-1] <= 60.0


def test_steps_of_changing_length() -> None:
    times = saved_at([5.0, 10.0, 20.0, 20.0, 45.0, 45.0, 5.0], 60.0)
    assert times == [55.0, 100.0, 145.0]


def test_interval_has_a_default_and_can_be_disabled() -> None:
    assert CheckpointSettings().every_minutes == 60.0
    assert saved_at([50.0] * 20, None) == []


def stopped_at(step_minutes: list[float], end_minutes: float | None, writing_minutes: float = 0.0) -> float | None:
    """Return the minute at which a run with these steps stops, or None if the run completes. The start takes five
    minutes."""
    deadline, now = Deadline(None if end_minutes is None else 60 * end_minutes, 0.0), 60 * 5.0
    deadline.start(now)
    deadline.wrote(60 * writing_minutes)
    for minutes in step_minutes:
        now += 60 * minutes
        if deadline.is_near(now):
            return now / 60
    return None


@pytest.mark.parametrize(
    ("steps", "writing", "stops"),
    [
        ([10.0] * 20, 0.0, 115.0),  # the next step would take 12 minutes with slack, and stopping at least one
        ([10.0] * 20, 3.0, 105.0),  # twice the time of a checkpoint
        ([10.0, 40.0, *[10.0] * 10], 0.0, 75.0),  # the longest of the last ten counts
        ([20.0, *[1.0] * 99], 0.0, 118.0),  # the longest step is no longer among the last ten
        ([200.0], 0.0, 205.0),  # the stop is late, but has a checkpoint
        ([10.0] * 10, 0.0, None),
    ],
)
def test_run_stops_before_its_deadline(steps: list[float], writing: float, stops: float | None) -> None:
    assert stopped_at(steps, 120.0, writing) == stops
    assert stopped_at(steps, None, writing) is None
