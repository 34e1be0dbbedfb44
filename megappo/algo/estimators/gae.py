"""Generalised advantage estimation (Schulman et al. 2016) with the values of the critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megappo.algo.estimators import GAE

if TYPE_CHECKING:  # settings are checked against the parameters without importing torch
    from torch import Tensor


def gae(
    *, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor, critic_lam: float, gae: GAE
) -> tuple[Tensor, Tensor]:
    """Compute GAE. Later rewards are discounted by gamma. The weight of the critic is 1 - lam.

    The returns of the critic may use a larger lambda (Yuan et al. 2025, "What's Behind PPO's Collapse in Long-CoT?",
    decoupled GAE).
    """
    advantages, returns = gae(rewards=rewards, values=values, mask=mask, gamma=gamma, lam=lam)
    if not isinstance(lam, int | float) or lam != critic_lam:
        _, returns = gae(rewards=rewards, values=values, mask=mask, gamma=gamma, lam=critic_lam)
    return advantages, returns
