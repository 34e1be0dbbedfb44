"""Correction of the gap between the policy that sampled (the engine) and the one that is trained."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megappo.algo.masks import check_mask, clean
from megappo_kernels.objectives import LOG_RATIO_LIMIT


def importance_weights(
    *,
    old_logprob: Tensor,
    engine_logprob: Tensor,
    mask: Tensor,
    level: Literal["token", "sequence", "geometric"] = "token",
    cap: float,
    reject_above: float | None = None,
    reject_below: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Truncated importance weights min(pi_trainer / pi_engine, cap).

    Args:
        old_logprob: (B, T) by the trainer with the weights that sampled, nats.
        engine_logprob: (B, T) as the engine reported them, nats.
        mask: (B, T) bool.
        level: one ratio per token; or for all tokens of a sample their ratios' product, or geometric mean.
        cap: weights are truncated here.
        reject_above: positions whose untruncated ratio exceeds this are left out.
        reject_below: and those whose ratio is less than this.

    Returns:
        weights (B, T), 1 at masked positions, and keep (B, T) bool, the mask without rejected positions.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". Where newer weights than
    those that sampled compute `old_logprob`, these weights and PPO's clipped ratio to it are the decoupled objective of
    Hilton et al. 2022, "Batch size-invariance for policy optimization", and Fu et al. 2025, "AReaL".
    """
    check_mask(mask, old_logprob=old_logprob, engine_logprob=engine_logprob)
    gap = clean(old_logprob, mask) - clean(engine_logprob, mask)
    if level != "token":
        total = gap.sum(-1, keepdim=True)
        of_sample = total if level == "sequence" else total / mask.sum(-1, keepdim=True).clamp(min=1)
        gap = of_sample.expand_as(gap)
    ratio = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    keep = mask if reject_above is None else mask & (ratio <= reject_above)
    keep = keep if reject_below is None else keep & (ratio >= reject_below)
    return torch.where(mask, ratio.clamp(max=cap), 1.0), keep
