"""Metrics of several rounds and ranks are equal to the metrics of all values."""

from __future__ import annotations

import math

import pytest
import torch

from megappo.runtime.ranks.tally import Tally, Totals

pytestmark = pytest.mark.usefixtures("world_of_one")

CPU = torch.device("cpu")


def totals(values: list[float]) -> Totals:
    """Return the totals of the values for all kinds of metrics."""
    tally, numbers = Tally(), torch.tensor(values)
    tally.mean("mean", numbers)
    tally.maximum("max", numbers)
    tally.minimum("min", numbers)
    tally.total("sum", sum(values))
    return tally.reduce_totals(CPU)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [([[1.0], [0.0, 0.0, 0.0]], {"mean": 0.25, "max": 1.0, "min": 0.0, "sum": 1.0}),
     ([[-3.0, -1.0], [], [-8.0]], {"mean": -4.0, "max": -1.0, "min": -8.0, "sum": -12.0}), ([[], []], {"sum": 0.0}),
     ([[2.0], [math.nan]], {"mean": math.nan, "sum": math.nan}),
     ([[math.inf], [1.0]], {"mean": math.inf, "max": math.inf, "min": 1.0, "sum": math.inf})],
)  # fmt: skip
def test_rounds_are_combined_by_kind_of_metric(rounds: list[list[float]], expected: dict[str, float]) -> None:
    combined = Totals.combined([totals(values) for values in rounds])
    assert {name: value for name, value in combined.items() if name in expected} == pytest.approx(expected, nan_ok=True)
    if not any(math.isnan(value) for values in rounds for value in values):
        assert combined.keys() == expected.keys()


def test_round_without_a_metric_is_ignored() -> None:
    tally = Tally()
    tally.mean("own", torch.tensor([4.0, 6.0]))
    combined = Totals.combined([totals([1.0]), tally.reduce_totals(CPU)])
    assert combined["own"] == 5.0 and combined["mean"] == 1.0


def test_metrics_without_values_are_absent() -> None:
    tally, no_values = Tally(), torch.tensor([False, False])
    tally.mean("mean", torch.ones(2), no_values)
    tally.maximum("max", torch.ones(2), no_values)
    tally.minimum("min", torch.ones(2), no_values)
    tally.mean_and_std("both", torch.ones(2), no_values)
    tally.mean("present", torch.ones(2))
    assert tally.reduce(CPU) == {"present": 1.0}
