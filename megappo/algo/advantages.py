"""Advantages: GAE with its critic, the estimators without one, and whitening over a global batch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megappo.algo.masks import check_mask, clean

_EPS = 1e-8


def masked_mean(*, values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the positions where `mask` is True; 0 where there is none."""
    check_mask(mask, values=values)
    cleaned = clean(values, mask)
    if dim is None:
        return cleaned.sum() / mask.sum().clamp(min=1)
    return cleaned.sum(dim) / mask.sum(dim).clamp(min=1)


@dataclass(frozen=True)
class WhitenStats:
    """Count, mean and sum of squared deviations of valid values; parts of a batch merge exactly.

    Three float64 scalars. The variance is that of the population (divided by count).
    """

    count: Tensor
    mean: Tensor
    m2: Tensor

    @property
    def variance(self) -> Tensor:
        """m2 / count; 0 without values."""
        return self.m2 / self.count.clamp(min=1)

    def pack(self) -> Tensor:
        """(3,) float64, to be gathered."""
        return torch.stack([self.count, self.mean, self.m2])

    @staticmethod
    def unpack(packed: Tensor) -> WhitenStats:
        """The inverse of `pack`."""
        return WhitenStats(*packed.unbind())

    @staticmethod
    def merge(parts: Sequence[WhitenStats]) -> WhitenStats:
        """Statistics of the union (Chan et al. 1979)."""
        total = parts[0]
        for part in parts[1:]:
            count = total.count + part.count
            share = part.count / count.clamp(min=1)
            delta = part.mean - total.mean
            total = WhitenStats(
                count, total.mean + delta * share, total.m2 + part.m2 + delta.square() * total.count * share
            )
        return total


def whiten_stats(*, values: Tensor, mask: Tensor) -> WhitenStats:
    """Statistics of the valid values."""
    check_mask(mask, values=values)
    chosen = values[mask].double()
    count = torch.tensor(float(chosen.numel()), dtype=torch.float64, device=values.device)
    mean = chosen.sum() / count.clamp(min=1)
    return WhitenStats(count, mean, (chosen - mean).square().sum())


def masked_whiten(*, values: Tensor, mask: Tensor, stats: WhitenStats | None = None, shift_mean: bool = True) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) at valid positions, 0 elsewhere.

    `stats` are those of the global batch, merged over ranks; default: of these values. Without `shift_mean` the mean
    is put back. A single valid value becomes 0 (or its mean).
    """
    check_mask(mask, values=values)
    stats = stats if stats is not None else whiten_stats(values=values, mask=mask)
    white = (clean(values, mask) - stats.mean) * torch.rsqrt(stats.variance + _EPS)
    white = white if shift_mean else white + stats.mean
    return clean(white, mask).to(values.dtype)


def compute_gae(*, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the valid tokens, as if the masked ones were not there.

    From the last token to the first, with (n, g) = (next value, running advantage) and m the mask:
    n' = (1-m) n + m v,  g' = (1-m+m gamma lam) g + m gamma n + m (r - v). After the last token both are 0.
    Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE", eq. 16.

    Args:
        rewards, values: (B, T) float32 or float64.
        mask: (B, T) bool; may have holes (turns of a conversation that the policy did not write).

    Returns:
        advantages (not whitened) and returns = advantages + values, both (B, T), 0 at masked positions.
    """
    check_mask(mask, rewards=rewards, values=values)
    values_BT = clean(values, mask)
    # (T, B): each step of the recursion reads contiguous memory.
    values_TB = values_BT.T.contiguous()
    mask_TB = mask.T.to(values.dtype)
    surplus_TB = (clean(rewards, mask) - values_BT).T.contiguous()
    decay_TB = 1 - mask_TB + mask_TB * (gamma * lam)
    bootstrap_TB = mask_TB * gamma
    advantages_TB = torch.empty_like(values_TB)
    following = torch.zeros_like(values_TB[0]) if len(values_TB) else values_TB.new_zeros(0)
    running = torch.zeros_like(following)
    for t in range(len(values_TB) - 1, -1, -1):
        running = torch.addcmul(surplus_TB[t], bootstrap_TB[t], following).addcmul_(decay_TB[t], running)
        following = torch.lerp(following, values_TB[t], mask_TB[t])
        advantages_TB[t] = running
    advantages_BT = clean(advantages_TB.T.contiguous(), mask)
    return advantages_BT, advantages_BT + values_BT


class GAE(Protocol):
    """`compute_gae`, or a faster function that equals it."""

    def __call__(
        self, *, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
    ) -> tuple[Tensor, Tensor]: ...


class _Compute(Protocol):
    def __call__(
        self,
        *,
        rewards: Tensor,
        values: Tensor | None,
        mask: Tensor,
        group_ids: Tensor,
        gamma: float,
        lam: float,
        gae: GAE,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Estimator:
    """A registered way to get advantages.

    Called with rewards (B, T), values (B, T) or None, mask (B, T), group_ids (B,) int64 (samples of one prompt share
    one; a group lies on one rank), gamma, lam and the function that does GAE; returns advantages and returns, both
    (B, T).
    """

    name: str
    compute: _Compute
    needs_critic: bool
    whiten: bool
    """Whether whitening over the global batch follows where the configuration asks for it."""

    def __call__(
        self,
        *,
        rewards: Tensor,
        values: Tensor | None,
        mask: Tensor,
        group_ids: Tensor,
        gamma: float,
        lam: float,
        gae: GAE = compute_gae,
    ) -> tuple[Tensor, Tensor]:
        """Compute; raises ValueError where a critic is needed and there are no values."""
        if self.needs_critic and values is None:
            raise ValueError(f"estimator '{self.name}' needs values; add a critic section, or choose grpo or rloo")
        check_mask(mask, rewards=rewards, values=values)
        return self.compute(
            rewards=rewards, values=values, mask=mask, group_ids=group_ids, gamma=gamma, lam=lam, gae=gae
        )


ESTIMATORS: dict[str, Estimator] = {}
"""By name."""


def register_estimator(name: str, *, needs_critic: bool, whiten: bool) -> Callable[[_Compute], _Compute]:
    """Add an estimator to the registry."""

    def add(compute: _Compute) -> _Compute:
        ESTIMATORS[name] = Estimator(name, compute, needs_critic, whiten)
        return compute

    return add


def get_estimator(name: str) -> Estimator:
    """Look an estimator up; raises ValueError with the nearest name."""
    if name not in ESTIMATORS:
        nearest = difflib.get_close_matches(name, ESTIMATORS, n=1, cutoff=0.0)[0]
        raise ValueError(f"'{name}' is not an estimator ({', '.join(ESTIMATORS)}); did you mean '{nearest}'?")
    return ESTIMATORS[name]


@register_estimator("gae", needs_critic=True, whiten=True)
def _gae(
    *, rewards: Tensor, values: Tensor | None, mask: Tensor, group_ids: Tensor, gamma: float, lam: float, gae: GAE
) -> tuple[Tensor, Tensor]:
    assert values is not None
    return gae(rewards=rewards, values=values, mask=mask, gamma=gamma, lam=lam)


@dataclass(frozen=True)
class _Groups:
    """Scores of the samples of each prompt: (B,) tensors, of a sample and its group."""

    deviations_B: Tensor
    """Score minus the group's mean."""
    squares_B: Tensor
    """Sum of the group's squared deviations."""
    sizes_B: Tensor

    @staticmethod
    def of(scores_B: Tensor, group_ids: Tensor) -> _Groups:
        """Means are taken above the group's lowest score, so that equal scores deviate by exactly 0: what rounding
        leaves of a mean of 3.3 would be divided by a standard deviation that is rounding too."""
        groups, index_B = torch.unique(group_ids, return_inverse=True)

        def sums_B(numbers_B: Tensor) -> Tensor:
            return numbers_B.new_zeros(len(groups)).index_add(0, index_B, numbers_B)[index_B]

        lowest = scores_B.new_full((len(groups),), torch.inf).scatter_reduce(0, index_B, scores_B, "amin")
        above_B, sizes_B = scores_B - lowest[index_B], sums_B(torch.ones_like(scores_B))
        deviations_B = above_B - sums_B(above_B) / sizes_B
        return _Groups(deviations_B, sums_B(deviations_B.square()), sizes_B)


def _spread(scores_B: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same advantage at every token of a sample."""
    spread = torch.where(mask, scores_B[:, None], 0.0)
    return spread, spread


@register_estimator("grpo", needs_critic=False, whiten=False)
def _grpo(
    *, rewards: Tensor, values: Tensor | None, mask: Tensor, group_ids: Tensor, gamma: float, lam: float, gae: GAE
) -> tuple[Tensor, Tensor]:
    """(score - mean) / (std + 1e-6) within the group, std unbiased; a group of one keeps its score.

    Shao et al. 2024, "DeepSeekMath", section 4.1.
    """
    scores_B = clean(rewards, mask).sum(-1)
    groups = _Groups.of(scores_B, group_ids)
    std_B = (groups.squares_B / (groups.sizes_B - 1).clamp(min=1)).sqrt()
    return _spread(torch.where(groups.sizes_B > 1, groups.deviations_B / (std_B + 1e-6), scores_B), mask)


@register_estimator("rloo", needs_critic=False, whiten=False)
def _rloo(
    *, rewards: Tensor, values: Tensor | None, mask: Tensor, group_ids: Tensor, gamma: float, lam: float, gae: GAE
) -> tuple[Tensor, Tensor]:
    """Score minus the mean of the group's other samples; a group of one keeps its score.

    Ahmadian et al. 2024, "Back to Basics", eq. 3.
    """
    scores_B = clean(rewards, mask).sum(-1)
    groups = _Groups.of(scores_B, group_ids)
    # Of n samples, the others' mean lies n / (n - 1) times as far away as the mean of all.
    others_B = groups.deviations_B * groups.sizes_B / (groups.sizes_B - 1).clamp(min=1)
    return _spread(torch.where(groups.sizes_B > 1, others_B, scores_B), mask)


@register_estimator("reinforce_plus_plus", needs_critic=False, whiten=True)
def _reinforce_plus_plus(
    *, rewards: Tensor, values: Tensor | None, mask: Tensor, group_ids: Tensor, gamma: float, lam: float, gae: GAE
) -> tuple[Tensor, Tensor]:
    """Discounted sum of the rewards that follow, whitened over the batch afterwards (Hu 2025, "REINFORCE++")."""
    returns, _ = gae(rewards=rewards, values=torch.zeros_like(rewards), mask=mask, gamma=gamma, lam=1.0)
    return returns, returns
