"""Generalised advantage estimation (Schulman et al. 2016) with the critic's values."""

from __future__ import annotations

from torch import Tensor

from megappo.algo.estimators import GAE


def gae(*, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, gae: GAE) -> tuple[Tensor, Tensor]:
    """What follows a token is discounted by gamma, and trusted to the critic by 1 - lam."""
    return gae(rewards=rewards, values=values, mask=mask, gamma=gamma, lam=lam)
