"""Discounted rewards without a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo.estimators import GAE


def reinforce_plus_plus(*, rewards: Tensor, mask: Tensor, gamma: float, gae: GAE) -> tuple[Tensor, Tensor]:
    """Discounted sum of the rewards that follow, whitened over the batch afterwards (Hu 2025, "REINFORCE++")."""
    returns, _ = gae(rewards=rewards, values=torch.zeros_like(rewards), mask=mask, gamma=gamma, lam=1.0)
    return returns, returns
