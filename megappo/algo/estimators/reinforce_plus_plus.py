"""Discounted rewards without a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megappo.algo.estimators import GAE

if TYPE_CHECKING:
    from torch import Tensor


def reinforce_plus_plus(*, rewards: Tensor, mask: Tensor, gamma: float, gae: GAE) -> tuple[Tensor, Tensor]:
    """Return the discounted sum of the later rewards, which is then whitened over the batch (Hu 2025,
    "REINFORCE++")."""
    returns, _ = gae(rewards=rewards, values=rewards.new_zeros(rewards.shape), mask=mask, gamma=gamma, lam=1.0)
    return returns, returns
