"""Surrogate losses of `algorithm.policy_loss`: settings, formulas with slopes, and declarations.

The formulas use only operations that torch and Triton's language share; see `objectives`. Arguments are the
settings `s` and per-token numbers: log-probabilities of the policy and of the old policy, their log-ratio clamped to
+-20, the exponential of this log-ratio, and the advantage.

The module imports torch only when a function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias


class _Torch:
    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


xp: Any = _Torch()
"""torch, or Triton's language in compiled kernels."""
Numbers: TypeAlias = Any
"""One number for each token: a tensor, or a block in Triton."""

LOG_RATIO_LIMIT = 20.0
"""Limit of log-ratios before exp, as in verl (verl/trainer/ppo/core_algos.py). The limit prevents an overflow from a
single outlier token. Outside the limit, slopes are 0, except for `cispo` and `dppo_*`, which bound their weights."""
ALMOST_NOTHING = 1e-8
"""Constant that is added to probabilities before the logarithm."""


def clamped(x: Numbers, low: Numbers, high: Numbers) -> Numbers:
    """Clamp `x` to [low, high]. NaN remains NaN."""
    return xp.where(x > high, high, xp.where(x < low, low, x))


def without_far(x: Surrogate, logprob: Numbers, old_logprob: Numbers) -> Surrogate:
    """Set the slopes of `x` to zero for tokens beyond LOG_RATIO_LIMIT."""
    is_far = xp.abs(logprob - old_logprob) > LOG_RATIO_LIMIT
    slope, weight = xp.where(is_far, 0.0, x.slope), xp.where(is_far, 0.0, x.weight)
    return Surrogate(x.loss, slope, x.clipfrac, x.clipfrac_lower, x.below, x.above, weight, x.position)


@dataclass(frozen=True)
class LossSettings:
    """Settings that surrogate losses read (see `BuiltinLoss.settings`)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """Bounds of the ratio: the ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None = None
    """Bound c > 1 of the loss for negative advantages. None: no bound."""
    penalty_coef: float = 0.0
    band_low: float = 0.2
    band_high: float = 0.2
    """Edges of the band. For ratios, the band is [1 - band_low, 1 + band_high]. For changes of probability, the band is
    [-band_low, band_high]."""
    band_cap: float = 20.0
    """Largest weight of a token in `dppo_tv` and `dppo_kl`, as in verl."""
    gate_positive: float = 1.0
    gate_negative: float = 1.05
    """Temperatures of `sapo`. With a larger temperature, the slope decreases faster outside a ratio of 1."""


class Surrogate(NamedTuple):
    """Surrogate loss of tokens, with its slope in `logprob` and the reported numbers."""

    loss: Numbers
    slope: Numbers
    clipfrac: Numbers
    clipfrac_lower: Numbers
    below: Numbers
    above: Numbers
    """Whether the token is outside the band of the loss. The loss clips or ignores such a
    token, or clamps the weight."""
    weight: Numbers
    """Factor on the advantage in the slope."""
    position: Numbers
    """Position of the token in the band: 0 at or below the lower edge, 1 at or above the upper edge."""


def position(x: Numbers, low: Numbers, high: Numbers) -> Numbers:
    """Return the position of `x` between `low` (0) and `high` (1), clamped."""
    return (clamped(x, low, high) - low) / (high - low)


def limited(ratio: Numbers, advantages: Numbers, low: Numbers, high: Numbers) -> Surrogate:
    """Compute max(-ratio * A, -clipped ratio * A), with the ratio clipped to [low, high]."""
    plain = -advantages * ratio
    within = -advantages * clamped(ratio, low, high)
    is_clipped = within > plain
    loss, slope = xp.where(is_clipped, within, plain), xp.where(is_clipped, 0.0, plain)
    below, above = is_clipped & (ratio < low), is_clipped & (ratio > high)
    weight = xp.where(is_clipped, 0.0, ratio)
    never = xp.zeros_like(is_clipped)
    return Surrogate(loss, slope, is_clipped, never, below, above, weight, position(ratio, low, high))


def weighted(
    logprob: Numbers, advantages: Numbers, weight: Numbers, below: Numbers, above: Numbers, place: Numbers
) -> Surrogate:
    """Compute -weight * A * logprob. The weight is constant in the gradient."""
    slope, never = -advantages * weight, xp.zeros_like(below)
    return Surrogate(slope * logprob, slope, below | above, never, below, above, weight, place)


def clip(
    s: LossSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """Compute PPO-clip (Schulman et al. 2017, eq. 7). `dual_clip` bounds the loss of negative advantages (Ye et al.
    2020, eq. 5)."""
    x = limited(ratio, advantages, 1 - s.clip_low, 1 + s.clip_high)
    if s.dual_clip is not None:
        bound = -advantages * s.dual_clip
        is_bounded = (advantages < 0) & (bound < x.loss)
        loss, slope = xp.where(is_bounded, bound, x.loss), xp.where(is_bounded, 0.0, x.slope)
        weight = xp.where(is_bounded, 0.0, x.weight)
        x = Surrogate(loss, slope, x.clipfrac, is_bounded, x.below, x.above, weight, x.position)
    return without_far(x, logprob, old_logprob)


def penalty(
    s: LossSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """Compute -ratio * A + penalty_coef * KL(old || new), with the k3 estimate of KL (Schulman et al. 2017, eq. 8).
    The loss has no band; the position is ratio / (1 + ratio)."""
    plain, never = -ratio * advantages, xp.zeros_like(ratio)
    loss, slope = plain + s.penalty_coef * (ratio - 1 - log_ratio), plain + s.penalty_coef * (ratio - 1)
    x = Surrogate(loss, slope, never, never, never, never, ratio, ratio / (1 + ratio))
    return without_far(x, logprob, old_logprob)


def dis(
    s: LossSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """Compute direct double-sided importance sampling: -f(ratio) * A * logprob.

    f(r) is r within [1 - band_low, 1 + band_high] and 0 outside, for positive and negative advantages. The old
    log-probability is the log-probability of the engine.

    Hou et al. 2026, "SAO" (arXiv 2607.07508), section 3.1; GLM-5 2026 (arXiv 2602.15763). f is a weight that is
    constant in the gradient. Within the band, the slope equals the slope of -ratio * A. The band of the papers is
    open; this band includes its edges.
    """
    low, high = 1 - s.band_low, 1 + s.band_high
    below, above = ratio < low, ratio > high
    weight = xp.where(below | above, 0.0, ratio)
    x = weighted(logprob, advantages, weight, below, above, position(ratio, low, high))
    return without_far(x, logprob, old_logprob)


def cispo(
    s: LossSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """Compute -clip(ratio, 1 - band_low, 1 + band_high) * A * logprob. The clipped ratio is constant in the
    gradient, so every token has a slope (MiniMax 2025, "MiniMax-M1", eq. 4 and 5)."""
    low, high = 1 - s.band_low, 1 + s.band_high
    below, above = ratio < low, ratio > high
    return weighted(logprob, advantages, clamped(ratio, low, high), below, above, position(ratio, low, high))


def gspo(
    s: LossSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """Compute PPO-clip with the geometric mean of the ratios of a sequence, clipped to [1 - band_low, 1 +
    band_high].

    Zheng et al. 2025, "Group Sequence Policy Optimization", GSPO-token (eq. 13 to 15) for per-token advantages. If
    all advantages of a sequence are equal, the gradient equals the gradient of eq. 5. `ratio` is the ratio of the
    sequence.
    """
    x = limited(ratio, advantages, 1 - s.band_low, 1 + s.band_high)
    return without_far(x, logprob, old_logprob)


def sapo(
    s: LossSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """Compute -4 / tau * sigmoid(tau * (ratio - 1)) * A (Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv
    2511.20347). tau is gate_positive for A > 0, and gate_negative otherwise. The loss has no band; the position is
    the gate."""
    tau = xp.where(advantages > 0, s.gate_positive, xp.zeros_like(ratio) + s.gate_negative)
    x = tau * (ratio - 1)
    small = xp.exp(-xp.abs(x))
    gate = xp.where(x < 0, small, 1.0) / (1 + small)
    weight = 4 * ratio * small / ((1 + small) * (1 + small))
    never = xp.zeros_like(ratio)
    loss, slope = -advantages * gate * (4 / tau), -advantages * weight
    return without_far(Surrogate(loss, slope, never, never, never, never, weight, gate), logprob, old_logprob)


def dppo(s: LossSettings, logprob: Numbers, ratio: Numbers, advantages: Numbers, change: Numbers) -> Surrogate:
    """Compute -min(ratio, band_cap) * A * logprob. The weight is constant in the gradient.

    The weight is 0 if A < 0 and `change` is below -band_low, or if A > 0 and `change` is above band_high.
    """
    below, above = (advantages < 0) & (change < -s.band_low), (advantages > 0) & (change > s.band_high)
    weight = xp.where(below | above, 0.0, xp.where(ratio > s.band_cap, s.band_cap, ratio))
    return weighted(logprob, advantages, weight, below, above, position(change, -s.band_low, s.band_high))


def dppo_tv(
    s: LossSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """Compute DPPO with a band for the change of the token's probability, new - old. This change is the total
    variation of the binary distribution of this token and all others (binary TV, arXiv 2602.04879, eq. 11 to 13).
    The cap of the ratio is the cap in verl."""
    return dppo(s, logprob, ratio, advantages, xp.exp(logprob) - xp.exp(old_logprob))


def dppo_kl(
    s: LossSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """Compute DPPO with a band for KL(old || new) of the binary distribution of this token and all others, in nats.
    The KL has the sign of the change of probability (binary KL, arXiv 2602.04879, eq. 14)."""
    new, old = xp.exp(logprob), xp.exp(old_logprob)
    not_new, not_old = clamped(1 - new, 0.0, 1.0), clamped(1 - old, 0.0, 1.0)  # rounding may leave logprobs above 0
    gap = logprob - old_logprob
    divergence = not_old * xp.log((not_old + ALMOST_NOTHING) / (not_new + ALMOST_NOTHING)) - old * gap
    return dppo(s, logprob, ratio, advantages, xp.where(new > old, divergence, -divergence))


@dataclass(frozen=True)
class BuiltinLoss:
    """Declaration of a built-in policy loss. The choices of `algorithm.policy_loss`, their documentation, their rules
    and their error messages follow from the declarations."""

    formula: Callable[..., Surrogate]
    """Function of the settings and of the numbers of a token. Its name is the name of the loss."""
    meaning: str
    """Words for the documentation of `algorithm.policy_loss`."""
    settings: Mapping[str, float | None]
    """Keys in `algorithm` of the settings that the formula reads, with the defaults of this loss. The key `a.b` is the
    field `a_b` of `LossSettings`. None: the default of this field."""
    sees_sequences: bool = False
    """Whether the log-ratio is the mean over the sequence of the token, so that slopes depend on whole sequences."""
    needs_engine: bool = False
    """Whether the old log-probabilities must be the log-probabilities of the engine."""
    ignores_outside: bool = False
    """Whether the loss ignores tokens outside of the band."""


_CHANGE = "ignores tokens by their change of probability"
POLICY_LOSSES: Mapping[str, BuiltinLoss] = {
    loss.formula.__name__: loss
    for loss in (
        BuiltinLoss(clip, "PPO-clip", {"clip_low": None, "clip_high": None, "dual_clip": None}),
        BuiltinLoss(penalty, "adaptive KL penalty against the old policy", {"penalty.coef": None}),
        BuiltinLoss(
            dis, "SAO: ignores tokens outside a band around the engine's probabilities",
            {"band.low": 0.8, "band.high": 3.0}, needs_engine=True, ignores_outside=True,
        ),
        BuiltinLoss(cispo, "ratios as bounded weights", {"band.low": 1.0, "band.high": 4.0}),
        BuiltinLoss(gspo, "ratios of sequences", {"band.low": 3e-4, "band.high": 4e-4}, sees_sequences=True),
        BuiltinLoss(sapo, "a soft gate", {"gate.positive": None, "gate.negative": None}),
        BuiltinLoss(dppo_tv, _CHANGE, {"band.low": 0.2, "band.high": 0.2, "band.cap": None}, ignores_outside=True),
        BuiltinLoss(dppo_kl, _CHANGE, {"band.low": 0.05, "band.high": 0.05, "band.cap": None}, ignores_outside=True),
    )
}  # fmt: skip
"""Built-in policy losses by name. Sources of the bands: SAO; ScaleRL (Khatri et al. 2025: weights up to 5, without a
lower limit) for `cispo`; GSPO; users of DPPO."""
