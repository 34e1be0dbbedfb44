"""What training makes of the scores of a step: less for answers that are too long or were cut, another unit, bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo.overlong import overlong_penalty
from megappo.config import Config
from megappo.runtime.tally import Tally
from megappo.types import Rollouts


def shaped(
    scores_B: Tensor, rollouts: Rollouts, config: Config, device: torch.device
) -> tuple[Tensor, dict[str, float]]:
    """The scores (B,) float32 of this rank as its samples are trained on, and what was made of them over all ranks.

    In this order, where the settings say so: `reward.truncated_score` for an answer that the length limit ended (ORZ),
    `reward.truncated_penalty` off it (the penalty for a missing end of TRL), `reward.overlong` (DAPO), and clip(scale *
    score + shift). A collective of the whole world.
    """
    reward, given_B, tally = config.reward, scores_B, Tally()
    if reward.truncated_score is not None:
        scores_B = torch.where(rollouts.truncated_B, reward.truncated_score, scores_B)
    scores_B = scores_B - reward.truncated_penalty * rollouts.truncated_B
    if reward.overlong is not None:
        most, buffer = config.rollout.max_response_tokens, reward.overlong.buffer_tokens
        penalty_B = overlong_penalty(rollouts.response_lengths_B, most_tokens=most, buffer_tokens=buffer)
        penalty_B = reward.overlong.penalty * penalty_B
        tally.mean("reward/overlong", penalty_B)
        scores_B = scores_B + penalty_B
    scores_B = reward.scale * scores_B + reward.shift
    if reward.clip is not None:
        low, high = reward.clip
        tally.mean("reward/clipped", (scores_B < low) | (scores_B > high))
        scores_B = scores_B.clamp(low, high)
    if reward.is_shaped:
        tally.mean("reward/given", given_B)
    return scores_B, tally.reduce(None, device) if reward.is_shaped else {}
