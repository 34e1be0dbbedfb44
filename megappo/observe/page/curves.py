"""Metrics of a run as curves: aligned to its steps, rounded, and thinned where there are very many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megappo.observe.evaluations import evaluation_results
from megappo.observe.json_values import JSONValue
from megappo.observe.metric_docs import METRICS, documented, over_steps

_MOST_NUMBERS = 250_000
"""Most numbers of all metrics of all runs on a page, about 2 MB."""
_POINTS = (100, 2_000)
"""Fewest and most points of a metric where a page has many metrics, or steps."""
_DIGITS = 6
_FEW = 6
_LARGEST_STEP = 2**53
"""Largest whole number that JavaScript has exactly."""
_SECONDS_PER_HOUR = 3600
FIRST = (
    "reward/mean", "kl/mean", "critic/explained_variance", "actor/entropy", "actor/ppo_kl",
    "actor/clipfrac", "mismatch/mean", "response/length", "response/truncated", "actor/grad_norm", "critic/grad_norm",
)  # fmt: skip
"""Metrics that are shown first, after the results of evaluations: the reward and the health of a run."""
Line = Mapping[str, float]
"""The metrics of a step by name, `step` aside."""


@dataclass(frozen=True)
class Curves:
    """The metrics of a run."""

    steps: list[int]
    """Steps of the points, rising; of a thinned curve the last step of each point."""
    hours: list[float | None]
    """Time in steps until then; None where no step has one."""
    series: dict[str, Sequence[JSONValue]]
    """Values by name, one per step. Of a metric that many steps lack: two lists, positions in `steps` and values. None
    stands for what is not finite."""
    steps_per_point: int

    def plain(self) -> dict[str, JSONValue]:
        """In JSON's types."""
        return {
            "steps": self.steps,
            "hours": self.hours,
            "stepsPerPoint": self.steps_per_point,
            "metrics": list(self.series.items()),
        }


def points_of(metrics: int) -> int:
    """Most points of each of so many metrics of all runs together."""
    fewest, most = _POINTS
    return max(fewest, min(most, _MOST_NUMBERS // max(1, metrics)))


def curves(lines: Mapping[int, Line], points: int) -> Curves:
    """The metrics of steps, at most `points` points for each metric. If there are more steps, each point combines
    several steps (`over_steps`). Raises ValueError if the number of a step is too large."""
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
    passed, found = 0.0, list[float | None]()
    for of_step in seconds:
        passed += of_step if of_step is not None and 0 <= of_step < math.inf else 0.0
        found.append(rounded(passed / _SECONDS_PER_HOUR))
    return found if passed else [None] * len(found)


def _series(lines: Mapping[int, Line], name: str, shares: Sequence[Sequence[int]]) -> Sequence[JSONValue]:
    there = [[lines[step][name] for step in share if name in lines[step]] for share in shares]
    values = [rounded(over_steps(name, share)) for share in there]
    present = [at for at, share in enumerate(there) if share]
    return values if 2 * len(present) > len(shares) else [present, [values[at] for at in present]]


def rounded(value: float, digits: int = _DIGITS) -> float | None:
    """A number of so many digits; None for one that is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < _LARGEST_STEP else short


def ordered(names: Iterable[str]) -> list[str]:
    """Names in the order of the documents, undocumented ones last."""
    places = {name: place for place, name in enumerate(METRICS)}
    return sorted(names, key=lambda name: (places.get(documented(name) or "", len(places)), name))


def first_shown(names: Sequence[str]) -> list[str]:
    """Returns the results of evaluations and the metrics in `FIRST`, or a few of `names` if there are none."""
    return [*evaluation_results(names), *(name for name in FIRST if name in names)] or list(names[:_FEW])


def descriptions(names: Iterable[str]) -> list[list[str]]:
    """Name, unit, meaning and healthy values of each metric that is documented."""
    return [[name, *METRICS[known]] for name in names if (known := documented(name)) is not None]
