"""Metrics of a step's episodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from megappo.observe.ends import End
from megappo.runtime.objects import all_gather_objects
from megappo.types import Episode

FAILURES = ("raised", "hung", "nonsense")
LIMITS = {
    "limit_turns": (End.OUT_OF_TURNS,),
    "limit_calls": (End.OUT_OF_CALLS,),
    "limit_turn_tokens": (End.TURN_CUT,),
    "limit_tokens": (End.RESPONSE_LIMIT, End.POSITION_LIMIT),
}
"""Metrics of the limits that ended episodes, with the ends that each counts."""
_LONGEST = ("episode/turns_max", "episode/seconds_max")


def episode_metrics(episodes: Iterable[Episode], response_tokens: Iterable[int]) -> dict[str, float]:
    """`episode/*`, `turn/*` and `tool/*` over the samples of all ranks; a collective of the world.

    `response_tokens`: all that follows the prompt of each sample.
    """
    sums, longest = defaultdict[str, float](float), dict.fromkeys(_LONGEST, 0.0)
    for episode, tokens in zip(episodes, response_tokens, strict=True):
        _count(episode, tokens, sums)
        longest["episode/turns_max"] = max(longest["episode/turns_max"], float(len(episode.turns)))
        longest["episode/seconds_max"] = max(longest["episode/seconds_max"], episode.seconds)
    whole, most = defaultdict[str, float](float), dict.fromkeys(_LONGEST, 0.0)
    for of_rank, longest_of_rank in all_gather_objects((dict(sums), longest)):
        for name, value in of_rank.items():
            whole[name] += value
        most = {name: max(value, longest_of_rank[name]) for name, value in most.items()}
    return {**_means(whole), **most}


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


def _means(sums: defaultdict[str, float]) -> dict[str, float]:
    episodes, played, turns = (max(sums[name], 1) for name in ("episodes", "played", "turns"))
    numbers = {
        "episode/turns": sums["turns"] / played,
        "episode/trajectories": sums["trajectories"] / played,
        "episode/left_out_tokens": sums["left_out_tokens"] / played,
        "episode/observed_tokens": sums["heard_tokens"] / played,
        "episode/seconds": sums["seconds"] / episodes,
        "episode/failures": sum(sums[f"failure {kind}"] for kind in FAILURES) / episodes,
        **{f"episode/{kind}": sums[f"failure {kind}"] / episodes for kind in FAILURES},
        **{f"episode/{name}": sum(sums[f"end {end}"] for end in ends) / episodes for name, ends in LIMITS.items()},
        "turn/tokens": sums["own_tokens"] / turns,
        "turn/reward": sums["rewards"] / turns,
    }
    for tool in sorted({name.split(" ", 1)[1].rsplit(" ", 1)[0] for name in sums if name.startswith("tool ")}):
        calls = sums[f"tool {tool} calls"]
        numbers[f"tool/{tool}/calls"] = calls / episodes
        numbers[f"tool/{tool}/failures"] = sums[f"tool {tool} failures"] / max(calls, 1)
        numbers[f"tool/{tool}/seconds"] = sums[f"tool {tool} seconds"] / max(calls, 1)
    return numbers
