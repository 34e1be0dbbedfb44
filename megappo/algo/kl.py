"""KL estimators, the KL in the reward, and what steers its weight."""

from __future__ import annotations

import difflib
import math
from typing import Any

import torch
from torch import Tensor

from megappo.algo.masks import check_mask, clean

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +- this before exp, so that one wild token cannot overflow a batch."""
_K3_LIMIT = 10.0

_ALIASES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
KL_KINDS = ("kl", "abs", "mse", "low_var_kl", *_ALIASES)
"""Names of the estimators; k1, k2 and k3 are those of http://joschu.net/blog/kl-approx.html."""


def kl_penalty(*, logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at each token from samples of the policy.

    With d = logprob - ref_logprob: `kl` (k1) d; `abs` |d|; `mse` (k2) d^2 / 2; `low_var_kl` (k3) e^-d - 1 + d
    (Schulman, "Approximating KL Divergence", 2020), with d clamped to +-20 before exp and the result to +-10.

    Args:
        logprob, ref_logprob: any one shape, in nats.
        kind: one of KL_KINDS.

    Returns:
        The same shape, in nats, differentiable in `logprob`.

    Raises ValueError for an unknown kind.
    """
    gap = logprob - ref_logprob
    match _ALIASES.get(kind, kind):
        case "kl":
            return gap
        case "abs":
            return gap.abs()
        case "mse":
            return 0.5 * gap.square()
        case "low_var_kl":
            bounded = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return ((-bounded).exp() - 1 + bounded).clamp(-_K3_LIMIT, _K3_LIMIT)
    nearest = difflib.get_close_matches(kind, KL_KINDS, n=1, cutoff=0.0)[0]
    raise ValueError(f"'{kind}' is not a KL estimator ({', '.join(KL_KINDS)}); did you mean '{nearest}'?")


def apply_kl_to_rewards(*, scores: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Token rewards (B, T): -coef * kl at every token, plus the sample's score at its last token.

    Args:
        scores: (B,) one score per sample, or (B, T) token scores.
        kl: (B, T) in nats.
        mask: (B, T) bool.
        coef: weight of the KL.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", eq. 2.
    """
    check_mask(mask, kl=kl)
    rewards = -coef * clean(kl, mask)
    if scores.shape == mask.shape:
        return rewards + clean(scores, mask)
    if scores.shape != mask.shape[:1]:
        raise ValueError(f"scores has shape {tuple(scores.shape)}, must be (B,) or the mask's {tuple(mask.shape)}")
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = positions == positions.masked_fill(~mask, -1).amax(dim=1, keepdim=True)
    return rewards + torch.where(last & mask, scores[:, None].to(rewards.dtype), 0.0)


def _finite(current_kl: float) -> float:
    if not math.isfinite(current_kl):
        raise ValueError(f"the measured KL is {current_kl}, must be finite; the log-probabilities are broken")
    return current_kl


class FixedKLController:
    """A weight that stays."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing moves."""
        _finite(current_kl)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """A weight that moves towards a target KL: value *= 1 + clip(kl/target - 1, -.2, .2) * n_steps / horizon.

    Ziegler et al. 2019, section 2.2. `target` and `current_kl` are in nats, both per token or both per response;
    `horizon` and `n_steps` in samples.
    """

    def __init__(self, value: float, target: float, horizon: int) -> None:
        super().__init__(value)
        self.target, self.horizon = target, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move after `n_steps` samples whose mean KL was `current_kl`."""
        error = min(max(_finite(current_kl) / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class PenaltyController(FixedKLController):
    """The weight of PPO-penalty: doubled above 1.5 x target, halved below target / 1.5.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", section 4; nats per token.
    """

    def __init__(self, value: float, target: float) -> None:
        super().__init__(value)
        self.target = target

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move after a step whose updates ended at KL(old || new) = `current_kl`; `n_steps` plays no part."""
        if _finite(current_kl) > 1.5 * self.target:
            self.value *= 2
        elif current_kl < self.target / 1.5:
            self.value /= 2
