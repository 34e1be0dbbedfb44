"""Metrics of the episodes of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from megappo.observe.ends import End
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.types import Episode

FAILURES = ("raised", "hung", "nonsense")
LIMITS = {
    "limit_turns": (End.OUT_OF_TURNS,),
    "limit_calls": (End.OUT_OF_CALLS,),
    "limit_turn_tokens": (End.TURN_CUT,),
    "limit_tokens": (End.RESPONSE_LIMIT, End.POSITION_LIMIT),
}
"""Metrics of the limits that ended episodes, with the counted ends of each metric."""
_MEANS = {
    "episode/turns": ("turns", "played"),
    "episode/trajectories": ("trajectories", "played"),
    "episode/left_out_tokens": ("left_out_tokens", "played"),
    "episode/observed_tokens": ("heard_tokens", "played"),
    "episode/seconds": ("seconds", "episodes"),
    "episode/failures": ("failures", "episodes"),
    "turn/tokens": ("own_tokens", "turns"),
    "turn/reward": ("rewards", "turns"),
}
"""Metrics that are means, with the names of their sum and their count in `_count`.

`played` counts episodes that did not fail. A failed episode has no turns.
"""


def episode_metrics(episodes: Iterable[Episode], response_tokens: Iterable[int]) -> dict[str, float]:
    """Return `episode/*`, `turn/*` and `tool/*` over the samples of all ranks. A collective of the world.

    `response_tokens`: number of tokens after the prompt of each sample.
    """
    sums, maxima = defaultdict[str, float](float), dict[str, float]()
    for episode, tokens in zip(episodes, response_tokens, strict=True):
        _count(episode, tokens, sums)
        _raise_to(maxima, "episode/seconds_max", episode.seconds)
        if not episode.failure:
            _raise_to(maxima, "episode/turns_max", float(len(episode.turns)))
    total, largest = defaultdict[str, float](float), dict[str, float]()
    for sums_of_rank, maxima_of_rank in all_gather_objects((dict(sums), maxima)):
        for name, value in sums_of_rank.items():
            total[name] += value
        for name, value in maxima_of_rank.items():
            _raise_to(largest, name, value)
    return _means(total) | largest


def _raise_to(maxima: dict[str, float], name: str, value: float) -> None:
    maxima[name] = max(maxima.get(name, value), value)


def _count(episode: Episode, tokens: int, sums: defaultdict[str, float]) -> None:
    own_tokens = sum(turn.stop - turn.start for turn in episode.turns)
    sums["episodes"] += 1
    sums["played"] += not episode.failure
    sums["turns"] += len(episode.turns)
    sums["trajectories"] += 0 if episode.failure else episode.trajectories
    sums["left_out_tokens"] += episode.left_out_tokens
    sums["own_tokens"] += own_tokens
    sums["heard_tokens"] += 0 if episode.failure else tokens - own_tokens
    sums["rewards"] += sum(turn.reward for turn in episode.turns)
    sums["seconds"] += episode.seconds
    if episode.failure:
        sums[f"failure {episode.failure}"] += 1
    else:
        sums[f"end {episode.end}"] += 1
    for tool, use in episode.tools.items():
        for what in ("calls", "failures", "seconds"):
            sums[f"tool {tool} {what}"] += getattr(use, what)


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return metrics from the sums of all ranks. A mean without an episode, turn or call is absent."""
    sums = defaultdict(float, sums)
    pairs = dict(_MEANS)
    for name, ends in LIMITS.items():
        sums[name] = sum(sums[f"end {end}"] for end in ends)
        pairs[f"episode/{name}"] = name, "episodes"
    sums["failures"] = sum(sums[f"failure {kind}"] for kind in FAILURES)
    pairs |= {f"episode/{kind}": (f"failure {kind}", "episodes") for kind in FAILURES}
    for tool in {name.split(" ", 1)[1].rsplit(" ", 1)[0] for name in sums if name.startswith("tool ")}:
        pairs[f"tool/{tool}/calls"] = f"tool {tool} calls", "episodes"
        for what in ("failures", "seconds"):
            pairs[f"tool/{tool}/{what}"] = f"tool {tool} {what}", f"tool {tool} calls"
    return {name: sums[total] / sums[count] for name, (total, count) in pairs.items() if sums[count]}
