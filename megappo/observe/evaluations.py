"""Names and labels of the results of evaluations, which the console and the page of a run show first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_RESULT = re.compile(r"eval/(?:(?P<set>.+)/)?(?:(?P<mean>reward_mean)|pass@(?P<k>\d{1,9}))")


def evaluation_results(names: Iterable[str]) -> list[str]:
    """Select the names of mean rewards and of `pass@k`. The validation set without a name is first. The other sets are
    in alphabetical order. The mean reward of a set precedes `pass@k`, in ascending order of k."""
    matches = {name: match for name in names if (match := _RESULT.fullmatch(name)) is not None}
    return sorted(matches, key=lambda name: (matches[name]["set"] or "", int(matches[name]["k"] or 0)))


def evaluation_label(name: str, right_above: Mapping[str, float]) -> str:
    """Return the label of a result, such as `math pass@4 (score > 0.5)`.

    `right_above`: `DataSettings.thresholds`. A response is right if its score is above the threshold of the set. A set
    that is missing in the mapping has no threshold in its label.
    """
    match = _RESULT.fullmatch(name)
    assert match is not None, "a name from evaluation_results"
    place = match["set"] or ""
    if match["mean"]:
        return f"eval {place}".strip()
    threshold = f" (score > {right_above[place]:g})" if place in right_above else ""
    return f"{place} pass@{match['k']}{threshold}".strip()
