"""Time of a step by stage and rank, as numbers and as a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = "profile"
"""Folder of profiles in the run directory."""
_OPERATORS, _RANKS = 12, 8
"""Maximum number of operators and ranks on the page. With more ranks, the page shows the fastest, the median and the
slowest rank of each stage."""

Interval = tuple[float, float]
"""Start and end in microseconds."""


@dataclass(frozen=True)
class StageShare:
    """Seconds of a stage on one rank."""

    stage: str
    seconds: float
    computing: float
    """Seconds with computation on the device."""
    exchanging: float
    """Seconds of collectives without simultaneous computation."""

    @property
    def idle(self) -> float:
        """Seconds without computation and collectives."""
        return self.seconds - self.computing - self.exchanging


@dataclass(frozen=True)
class RankProfile:
    """Profile of a step on one rank."""

    stages: list[StageShare]
    operators: dict[str, float]
    """Seconds of each GPU kernel. On a CPU, seconds of each operator without called operators."""
    calls: dict[str, int]


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals, in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _within(intervals: Sequence[Interval], start: float, end: float) -> float:
    """Return the seconds of disjoint intervals between `start` and `end`."""
    return 1e-6 * sum(max(0.0, min(end, b) - max(start, a)) for a, b in intervals)


def shares(stages: Sequence[tuple[str, Interval]], work: list[Interval], exchange: list[Interval]) -> list[StageShare]:
    """Split the time of each stage. Stages with the same name are summed."""
    busy, either = united(work), united([*work, *exchange])
    by_stage: dict[str, StageShare] = {}
    for name, (start, end) in stages:
        before = by_stage.get(name, StageShare(name, 0.0, 0.0, 0.0))
        computing = _within(busy, start, end)
        by_stage[name] = StageShare(
            name,
            before.seconds + 1e-6 * (end - start),
            before.computing + computing,
            before.exchanging + _within(either, start, end) - computing,
        )
    return list(by_stage.values())


def _chosen(times: Mapping[int, StageShare]) -> Iterator[int]:
    """Return the ranks that the page shows for a stage."""
    order = sorted(times, key=lambda rank: times[rank].seconds)
    return iter(sorted(times) if len(order) <= _RANKS else (order[0], order[len(order) // 2], order[-1]))


def page(step: int, ranks: Sequence[RankProfile], where: str) -> str:
    """Return a page of Markdown with the stages on each rank, including idle time, and the slowest operators."""
    lines = [f"# Step {step}, traced", "", f"{len(ranks)} ranks, {where}. A traced step takes longer than others.", ""]
    lines += ["| stage | rank | seconds | computing | exchanging | idle |", "|---|---|---|---|---|---|"]
    by_rank = [{share.stage: share for share in rank.stages} for rank in ranks]
    for stage in dict.fromkeys(share.stage for rank in ranks for share in rank.stages):
        times = {number: of[stage] for number, of in enumerate(by_rank) if stage in of}
        for rank in _chosen(times):
            lines.append(f"| {stage} | {rank} | {_row(times[rank])} |")
    for rank in _chosen({number: _whole(profile) for number, profile in enumerate(ranks)}):
        lines.append(f"| all | {rank} | {_row(_whole(ranks[rank]))} |")
    lines += ["", "| operator | calls | seconds | share of computing |", "|---|---|---|---|"]
    names = {name for rank in ranks for name in rank.operators}
    mean = {name: statistics.fmean(rank.operators.get(name, 0.0) for rank in ranks) for name in names}
    total = sum(mean.values()) or 1.0
    for name in sorted(names, key=lambda name: (-mean[name], name))[:_OPERATORS]:
        calls = statistics.fmean(rank.calls.get(name, 0) for rank in ranks)
        lines.append(f"| `{name[:80]}` | {calls:.0f} | {mean[name]:.3f} | {mean[name] / total:.0%} |")
    lines += [
        "",
        "Calls and seconds are means over ranks. Seconds of an operator exclude the operators that it calls.",
    ]
    return "\n".join(lines) + "\n"


def _whole(rank: RankProfile) -> StageShare:
    of = rank.stages
    return StageShare("all", *(sum(getattr(s, part) for s in of) for part in ("seconds", "computing", "exchanging")))


def _row(share: StageShare) -> str:
    parts = (share.computing, share.exchanging, share.idle)
    return " | ".join([f"{share.seconds:.3f}", *(f"{part / (share.seconds or 1.0):.0%}" for part in parts)])


def newest_page(directory: Path) -> Path | None:
    """Return the page of the newest traced step of a run, or None without a traced step."""
    return max((directory / FOLDER).glob("step-*.md"), default=None)
