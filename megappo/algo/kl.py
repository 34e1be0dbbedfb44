"""KL divergence as a part of the reward."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo.masks import check_mask, clean


def apply_kl_to_rewards(*, scores: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Return token rewards (B, T): -coef * kl at every token, plus the score of the sample at its last token.

    Args:
        scores: (B,) one score per sample, or (B, T) token scores.
        kl: (B, T) in nats.
        mask: (B, T) bool.
        coef: Weight of the KL.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", eq. 2.
    """
    check_mask(mask, kl=kl)
    rewards = -coef * clean(kl, mask)
    if scores.shape == mask.shape:
        return rewards + clean(scores, mask)
    if scores.shape != mask.shape[:1]:
        raise ValueError(f"scores has shape {tuple(scores.shape)}, must be (B,) or the mask's {tuple(mask.shape)}")
    return rewards + on_last_tokens(scores.to(rewards.dtype), mask)


def on_last_tokens(scores_B: Tensor, mask: Tensor) -> Tensor:
    """Return (B, T) with the score of each sample at its last unmasked token, and 0 elsewhere."""
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = positions == positions.masked_fill(~mask, -1).amax(dim=1, keepdim=True)
    return torch.where(last & mask, scores_B[:, None], 0.0)
