"""Metrics of a run as curves: aligned by step, rounded, and reduced to a limited number of points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megappo.files.json_values import JSONValue
from megappo.observe.evaluations import evaluation_results
from megappo.observe.metric_docs import METRICS, documented, over_steps

_MOST_NUMBERS = 250_000
"""Maximum number of values on a page, for all metrics and runs: about 2 MB."""
_POINTS = (100, 2_000)
"""Minimum and maximum number of points of a metric, for pages with many metrics or steps."""
_DIGITS = 6
_FEW = 6
_LARGEST_STEP = 2**53
"""Largest integer that JavaScript represents exactly."""
_SECONDS_PER_HOUR = 3600
FIRST = (
    "reward/mean", "kl/mean", "critic/explained_variance", "actor/entropy", "actor/ppo_kl",
    "actor/clipfrac", "mismatch/mean", "response/length", "response/truncated", "actor/grad_norm", "critic/grad_norm",
)  # fmt: skip
"""Metrics that are shown after the results of evaluations: reward and health of a run."""
Line = Mapping[str, float]
"""Metrics of a step by name, without `step`."""


@dataclass(frozen=True)
class Curves:
    """Metrics of a run as points of curves."""

    steps: list[int]
    """Steps of the points in ascending order. If a point combines several steps, its last step."""
    hours: list[float | None]
    """Cumulative `time/step` in hours at each point; None if no step has a time."""
    series: dict[str, Sequence[JSONValue]]
    """Values by name, one per step. A metric that many steps lack has two lists: positions in `steps`, and values.
    None replaces values that are not finite."""
    steps_per_point: int
    """Number of steps that a point combines."""

    def plain(self) -> dict[str, JSONValue]:
        """Return the curves in JSON types."""
        return {
            "steps": self.steps,
            "hours": self.hours,
            "stepsPerPoint": self.steps_per_point,
            "metrics": list(self.series.items()),
        }


def points_of(metrics: int) -> int:
    """Return the maximum number of points of each metric. `metrics`: number of metrics of all runs together."""
    fewest, most = _POINTS
    return max(fewest, min(most, _MOST_NUMBERS // max(1, metrics)))


def curves(lines: Mapping[int, Line], points: int) -> Curves:
    """Return the metrics of steps, at most `points` points for each metric. If there are more steps, each point
    combines several steps (`over_steps`). Raises ValueError if the number of a step is too large."""
    steps = sorted(lines)
    if steps and not -_LARGEST_STEP <= steps[0] <= steps[-1] <= _LARGEST_STEP:
        raise ValueError(f"a step is beyond {_LARGEST_STEP}; remove its line from metrics.jsonl")
    per_point = max(1, math.ceil(len(steps) / points))
    shares = [steps[at : at + per_point] for at in range(0, len(steps), per_point)]
    hours = dict(zip(steps, _hours(lines[step].get("time/step") for step in steps), strict=True))
    ends = [share[-1] for share in shares]
    series = {name: _series(lines, name, shares) for name in ordered({n for line in lines.values() for n in line})}
    return Curves(ends, [hours[step] for step in ends], series, per_point)


def _hours(seconds: Iterable[float | None]) -> list[float | None]:
    passed, hours = 0.0, list[float | None]()
    for of_step in seconds:
        passed += of_step if of_step is not None and 0 <= of_step < math.inf else 0.0
        hours.append(rounded(passed / _SECONDS_PER_HOUR))
    return hours if passed else [None] * len(hours)


def _series(lines: Mapping[int, Line], name: str, shares: Sequence[Sequence[int]]) -> Sequence[JSONValue]:
    present_values = [[lines[step][name] for step in share if name in lines[step]] for share in shares]
    values = [rounded(over_steps(name, share)) for share in present_values]
    present = [at for at, share in enumerate(present_values) if share]
    return values if 2 * len(present) > len(shares) else [present, [values[at] for at in present]]


def rounded(value: float, digits: int = _DIGITS) -> float | None:
    """Return a number rounded to `digits` significant digits, or None if the number is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < _LARGEST_STEP else short


def ordered(names: Iterable[str]) -> list[str]:
    """Return names in the order of the documents. Undocumented names are last."""
    places = {name: place for place, name in enumerate(METRICS)}
    return sorted(names, key=lambda name: (places.get(documented(name) or "", len(places)), name))


def first_shown(names: Sequence[str]) -> list[str]:
    """Return the results of evaluations and the metrics of `FIRST`, or the first few `names` if both are missing."""
    return [*evaluation_results(names), *(name for name in FIRST if name in names)] or list(names[:_FEW])


def descriptions(names: Iterable[str]) -> list[list[str]]:
    """Return name, unit, meaning and healthy values of each documented metric."""
    return [[name, *METRICS[known]] for name in names if (known := documented(name)) is not None]
