"""Correction of the mismatch between the sampling policy (the engine) and the trained policy."""

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
    """Compute truncated importance weights min(pi_trainer / pi_engine, cap).

    Args:
        old_logprob: (B, T) in nats, computed by the trainer with the weights that sampled.
        engine_logprob: (B, T) in nats, as reported by the engine.
        mask: (B, T) bool.
        level: One ratio per token, or one ratio per sample: the product or the geometric mean of its token ratios.
        cap: Upper limit of the weights.
        reject_above: Positions whose untruncated ratio exceeds this value are rejected.
        reject_below: Positions whose untruncated ratio is below this value are rejected.

    Returns:
        weights (B, T), 1 at masked positions, and keep (B, T) bool, the mask without rejected positions.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". If newer weights
    compute `old_logprob`, these weights and PPO's clipped ratio form the decoupled objective of Hilton et al. 2022,
    "Batch size-invariance for policy optimization", and Fu et al. 2025, "AReaL".
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
