"""Dynamic sampling: a step keeps groups of samples with differing rewards, from several rounds of rollouts.

A group contains the samples of one prompt. A group with equal rewards has zero advantages, so other prompts replace
it (Yu et al. 2025, "DAPO", section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megappo.algo.groups import Groups
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.runtime.ranks.tally import Totals
from megappo.types import Episodes, Experience, Rollouts, Scored

Whole = TypeVar("Whole", Experience, Rollouts)


@dataclass(frozen=True)
class _RewardedRound:
    """This rank's samples of a round.

    `spread` covers the groups of all ranks in prompt order: True if the rewards of a group differ.
    """

    rollouts: Rollouts
    scores_B: Tensor
    metrics: Totals
    spread: tuple[bool, ...]


@dataclass
class Selection:
    """Rounds of a step. All decisions are identical on every rank."""

    prompts: int
    """Number of groups that the step needs."""
    samples_per_prompt: int
    max_rounds: int
    rounds: list[_RewardedRound] = field(default_factory=list)

    def add(self, rollouts: Rollouts, scores_B: Tensor, metrics: Totals) -> None:
        """Add this rank's samples of a round, and the reward metrics of all ranks. A collective of the world."""
        group_B, has_failed_B = rollouts.sample_ids_B // self.samples_per_prompt, rollouts.group_ids_B < 0
        own_groups = dict.fromkeys(group_B.tolist(), False)
        parts_BN, whole_B = rollouts.reward_parts_BN(scores_B)[~has_failed_B], group_B[~has_failed_B]
        own_groups |= zip(whole_B.tolist(), Groups.of(parts_BN, whole_B).differ_B.tolist(), strict=True)
        all_groups = {group: differs for part in all_gather_objects(own_groups) for group, differs in part.items()}
        self.rounds.append(
            _RewardedRound(rollouts, scores_B, metrics, tuple(all_groups[group] for group in sorted(all_groups)))
        )

    @property
    def kept(self) -> int:
        """Number of groups with differing rewards."""
        return sum(sum(of_round.spread) for of_round in self.rounds)

    @property
    def drawn(self) -> int:
        """Number of groups in all rounds."""
        return sum(len(of_round.spread) for of_round in self.rounds)

    @property
    def wanted(self) -> int:
        """Number of prompts for the next round, or 0 without a next round.

        The number fills the step if the share of groups with differing rewards stays the same.
        """
        missing = self.prompts - self.kept
        if missing <= 0 or len(self.rounds) == self.max_rounds:
            return 0
        return min(self.prompts, math.ceil(missing * self.drawn / max(1, self.kept)))

    def finish(self) -> tuple[Rollouts, Tensor, dict[str, float]]:
        """Return this rank's renumbered samples of the step, their scores, and metrics.

        The metrics are `group/*` and the reward metrics of all rounds. The step takes the first groups with differing
        rewards in prompt order. The first groups with equal rewards fill the step if groups are missing.
        """
        every = [(differs, r, g) for r, of_round in enumerate(self.rounds) for g, differs in enumerate(of_round.spread)]
        chosen = sorted(every, key=lambda group: (not group[0], *group[1:]))[: self.prompts]
        numbers = {place: n for n, place in enumerate(sorted((r, g) for _, r, g in chosen))}
        parts, scores, ids = list[tuple[Rollouts, list[int]]](), list[Tensor](), list[int]()
        for r, of_round in enumerate(self.rounds):
            places = [divmod(i, self.samples_per_prompt) for i in of_round.rollouts.sample_ids_B.tolist()]
            rows = [b for b, (group, _) in enumerate(places) if (r, group) in numbers]
            ids += [numbers[r, places[b][0]] * self.samples_per_prompt + places[b][1] for b in rows]
            parts.append((of_round.rollouts, rows))
            scores.append(of_round.scores_B[rows])
        sample_ids_B = torch.tensor(ids, dtype=torch.int64)
        rollouts = joined(parts)
        metrics = {
            "group/spread": self.kept / self.drawn,
            "group/rounds": float(len(self.rounds)),
            "group/filled": sum(not differs for differs, _, _ in chosen) / self.prompts,
        }
        metrics |= Totals.combined([of_round.metrics for of_round in self.rounds])
        return renumbered(rollouts, sample_ids_B, self.samples_per_prompt), torch.cat(scores), metrics


def rewards_of_groups(rollouts: Rollouts, scores_B: Tensor, samples_per_prompt: int) -> dict[int, list[float]]:
    """Return the rewards of each of this rank's groups by group number, without failed episodes."""
    rewards: dict[int, list[float]] = {}
    columns = (rollouts.sample_ids_B, rollouts.total_rewards_B(scores_B), rollouts.group_ids_B < 0)
    for sample_id, total, has_failed in zip(*(column.tolist() for column in columns), strict=True):
        rewards.setdefault(sample_id // samples_per_prompt, []).extend([] if has_failed else [total])
    return rewards


def renumbered(rollouts: Rollouts, sample_ids_B: Tensor, samples_per_prompt: int) -> Rollouts:
    """Return the samples at other positions of the global batch. Each failed episode remains a separate group."""
    group_ids_B = torch.where(rollouts.group_ids_B < 0, -1 - sample_ids_B, sample_ids_B // samples_per_prompt)
    return replace(rollouts, sample_ids_B=sample_ids_B, group_ids_B=group_ids_B)


def joined(parts: Sequence[tuple[Whole, Sequence[int]]]) -> Whole:
    """Concatenate rows of several rollouts or experiences. Without any row, return zero rows of the first part."""
    some = [(whole, list(rows)) for whole, rows in parts if rows] or [(parts[0][0], list[int]())]
    rollouts = [whole if isinstance(whole, Rollouts) else whole.scored.rollouts for whole, _ in some]
    lengths = [int(x.response_lengths_B[b]) for x, (_, rows) in zip(rollouts, some, strict=True) for b in rows]
    return type(parts[0][0])(**_joined_fields(some, max(lengths, default=1)))


def _joined_fields(parts: Sequence[tuple[Any, list[int]]], longest: int) -> dict[str, Any]:
    """Concatenate the fields of dataclasses.

    A field is a (B,) or (B, R) tensor, a tuple of B values, another such dataclass, or None in all parts.
    """
    columns: dict[str, Any] = {}
    for each in fields(parts[0][0]):
        values = [(getattr(whole, each.name), rows) for whole, rows in parts]
        first = values[0][0]
        if first is None:
            columns[each.name] = None
        elif isinstance(first, Tensor):
            columns[each.name] = torch.cat([_widened(x, longest)[rows] for x, rows in values])
        elif isinstance(first, Episodes | Rollouts | Scored):
            columns[each.name] = type(first)(**_joined_fields(values, longest))
        else:
            columns[each.name] = tuple(x[b] for x, rows in values for b in rows)
    return columns


def _widened(x: Tensor, longest: int) -> Tensor:
    """Pad or cut a (B, R) tensor at the right to (B, longest). A (B,) tensor is unchanged."""
    if x.dim() == 1:
        return x
    return torch.nn.functional.pad(x, (0, max(0, longest - x.shape[1])))[:, :longest]
