"""No more than `checkpoint.every_minutes` of training can be lost."""

from __future__ import annotations

import pytest

from megappo.checkpoint.clock import Clock, Deadline
from megappo.config.schema import CheckpointSettings


def saved_at(step_minutes: list[float], every_minutes: float | None) -> list[float]:
    """Minutes at which a run with steps of these lengths writes checkpoints, whose writing takes no time."""
    clock, now, found = Clock(every_minutes, 0.0), 0.0, []
    for minutes in step_minutes:
        now += 60 * minutes
        if clock.is_late(now):
            clock.restart(now)
            found.append(now / 60)
    return found


@pytest.mark.parametrize("minutes", [1.0, 7.0, 25.0, 29.0, 31.0, 50.0])
def test_what_a_killed_run_loses_has_a_bound(minutes: float) -> None:
    """A checkpoint comes before the step that would pass the bound, not after it."""
    times = saved_at([minutes] * 200, 60.0)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert max(gaps) <= 60.0
    assert min(gaps) > 60.0 - 2 * minutes, "written more often than need be"
    assert 200 * minutes - times[-1] <= 60.0


def test_steps_of_changing_length() -> None:
    times = saved_at([5.0, 10.0, 20.0, 20.0, 45.0, 45.0, 5.0], 60.0)
    assert times == [55.0, 100.0, 145.0]


def test_it_is_on_by_default_and_can_be_left_out() -> None:
    assert CheckpointSettings().every_minutes == 60.0
    assert saved_at([50.0] * 20, None) == []


def stopped_at(step_minutes: list[float], end_minutes: float | None, writing_minutes: float = 0.0) -> float | None:
    """The minute at which a run with such steps stops, whose start took five minutes; None: it goes through."""
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
        ([10.0] * 20, 0.0, 115.0),  # the next step would take 12, with slack, and stopping a minute at least
        ([10.0] * 20, 3.0, 105.0),  # twice what a checkpoint took
        ([10.0, 40.0, *[10.0] * 10], 0.0, 75.0),  # the longest of the last ten counts
        ([20.0, *[1.0] * 99], 0.0, 118.0),  # until it is no more among them
        ([200.0], 0.0, 205.0),  # too late, but with a checkpoint
        ([10.0] * 10, 0.0, None),
    ],
)
def test_a_run_stops_before_its_time_is_up(steps: list[float], writing: float, stops: float | None) -> None:
    assert stopped_at(steps, 120.0, writing) == stops
    assert stopped_at(steps, None, writing) is None
