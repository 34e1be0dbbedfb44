"""Surrogate losses that `algorithm.policy_loss` can name, with their slopes.

Written in the vocabulary that torch and Triton's language share, see `objectives`. Each function gets the settings `s`
and for each token the log-probabilities of the policy and of the old one, their log-ratio within +-20, its exponential
and the advantage.

Nothing here imports torch before it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias


class _Torch:
    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


xp: Any = _Torch()
"""torch; replaced by Triton's language in compiled kernels."""
Numbers: TypeAlias = Any
"""A number for each token: a tensor, or a block of Triton's."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, as in verl (verl/trainer/ppo/core_algos.py), so that no outlier token
can overflow a batch. Beyond the limit slopes are 0, except with `cispo` and `dppo_*`, whose weights are bounded."""
ALMOST_NOTHING = 1e-8
"""Added to probabilities before taking their logarithm."""


def clamped(x: Numbers, low: Numbers, high: Numbers) -> Numbers:
    """`x` within [low, high]; NaN stays NaN."""
    return xp.where(x > high, high, xp.where(x < low, low, x))


def without_far(x: Surrogate, logprob: Numbers, old_logprob: Numbers) -> Surrogate:
    """`x` with zero slopes for tokens beyond LOG_RATIO_LIMIT."""
    is_far = xp.abs(logprob - old_logprob) > LOG_RATIO_LIMIT
    slope, weight = xp.where(is_far, 0.0, x.slope), xp.where(is_far, 0.0, x.weight)
    return Surrogate(x.loss, slope, x.clipfrac, x.clipfrac_lower, x.below, x.above, weight, x.position)


class BandSettings(Protocol):
    """Settings that surrogate losses read; see `objectives.PolicyObjective`."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    penalty_coef: float
    band_low: float
    band_high: float
    gate_positive: float
    gate_negative: float
    weight_cap: float


class Surrogate(NamedTuple):
    """A surrogate loss of tokens, its slope in `logprob`, and what is reported of it."""

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
    """Position of the token in the band: 0 at its lower edge or below, 1 at its upper edge or above."""


def position(x: Numbers, low: Numbers, high: Numbers) -> Numbers:
    """Position of `x` between `low` (0) and `high` (1), clamped."""
    return (clamped(x, low, high) - low) / (high - low)


def limited(ratio: Numbers, advantages: Numbers, low: Numbers, high: Numbers) -> Surrogate:
    """max(-ratio * A, -clipped ratio * A), the ratio clipped to [low, high]."""
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
    """-weight * A * logprob, with the weight constant in the gradient."""
    slope, never = -advantages * weight, xp.zeros_like(below)
    return Surrogate(slope * logprob, slope, below | above, never, below, above, weight, place)


def clip(
    s: BandSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """PPO-clip (Schulman et al. 2017, eq. 7), bounded where the advantage is negative (Ye et al. 2020, eq. 5)."""
    x = limited(ratio, advantages, 1 - s.clip_low, 1 + s.clip_high)
    if s.dual_clip is not None:
        bound = -advantages * s.dual_clip
        is_bounded = (advantages < 0) & (bound < x.loss)
        loss, slope = xp.where(is_bounded, bound, x.loss), xp.where(is_bounded, 0.0, x.slope)
        weight = xp.where(is_bounded, 0.0, x.weight)
        x = Surrogate(loss, slope, x.clipfrac, is_bounded, x.below, x.above, weight, x.position)
    return without_far(x, logprob, old_logprob)


def penalty(
    s: BandSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """-ratio * A + penalty_coef * KL(old || new), estimated by k3 (Schulman et al. 2017, eq. 8). No band: the position
    is ratio / (1 + ratio)."""
    plain, never = -ratio * advantages, xp.zeros_like(ratio)
    loss, slope = plain + s.penalty_coef * (ratio - 1 - log_ratio), plain + s.penalty_coef * (ratio - 1)
    x = Surrogate(loss, slope, never, never, never, never, ratio, ratio / (1 + ratio))
    return without_far(x, logprob, old_logprob)


def dis(
    s: BandSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """Direct double-sided importance sampling: -f(ratio) * A * logprob, f(r) = r within [1 - band_low, 1 + band_high]
    and 0 outside, whatever the advantage's sign. The old log-probability is the engine's.

    Hou et al. 2026, "SAO" (arXiv 2607.07508), section 3.1; GLM-5 2026 (arXiv 2602.15763). f is a weight, constant in
    the gradient, which is that of -ratio * A within the band: the slope is the same with it or without. The papers'
    band is open; here its edges belong to it.
    """
    low, high = 1 - s.band_low, 1 + s.band_high
    below, above = ratio < low, ratio > high
    weight = xp.where(below | above, 0.0, ratio)
    x = weighted(logprob, advantages, weight, below, above, position(ratio, low, high))
    return without_far(x, logprob, old_logprob)


def cispo(
    s: BandSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """-clip(ratio, 1 - band_low, 1 + band_high) * A * logprob, the clipped ratio constant in the gradient: every token
    keeps a slope (MiniMax 2025, "MiniMax-M1", eq. 4 and 5)."""
    low, high = 1 - s.band_low, 1 + s.band_high
    below, above = ratio < low, ratio > high
    return weighted(logprob, advantages, clamped(ratio, low, high), below, above, position(ratio, low, high))


def gspo(
    s: BandSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """PPO-clip of the geometric mean of a sequence's ratios, within [1 - band_low, 1 + band_high].

    Zheng et al. 2025, "Group Sequence Policy Optimization", in the form for advantages of tokens (GSPO-token, eq. 13
    to 15), whose gradient is that of eq. 5 where a sequence's advantages are equal. `ratio` is the sequence's here.
    """
    x = limited(ratio, advantages, 1 - s.band_low, 1 + s.band_high)
    return without_far(x, logprob, old_logprob)


def sapo(
    s: BandSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """-4 / tau * sigmoid(tau * (ratio - 1)) * A, with tau gate_positive where A > 0 and gate_negative elsewhere (Gao et
    al. 2025, "Soft Adaptive Policy Optimization", arXiv 2511.20347). No band: the position is the gate."""
    tau = xp.where(advantages > 0, s.gate_positive, xp.zeros_like(ratio) + s.gate_negative)
    x = tau * (ratio - 1)
    small = xp.exp(-xp.abs(x))
    gate = xp.where(x < 0, small, 1.0) / (1 + small)
    weight = 4 * ratio * small / ((1 + small) * (1 + small))
    never = xp.zeros_like(ratio)
    loss, slope = -advantages * gate * (4 / tau), -advantages * weight
    return without_far(Surrogate(loss, slope, never, never, never, never, weight, gate), logprob, old_logprob)


def dppo(s: BandSettings, logprob: Numbers, ratio: Numbers, advantages: Numbers, change: Numbers) -> Surrogate:
    """-min(ratio, weight_cap) * A * logprob, the weight constant in the gradient, 0 where a token's `change` is
    further than band_low down, with A < 0, or band_high up, with A > 0."""
    below, above = (advantages < 0) & (change < -s.band_low), (advantages > 0) & (change > s.band_high)
    weight = xp.where(below | above, 0.0, xp.where(ratio > s.weight_cap, s.weight_cap, ratio))
    return weighted(logprob, advantages, weight, below, above, position(change, -s.band_low, s.band_high))


def dppo_tv(
    s: BandSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """DPPO with tokens left out by the change of their probability, new - old: the total variation of "this token or
    another" (binary TV, arXiv 2602.04879, eq. 11 to 13). The ratio is capped as verl does it."""
    return dppo(s, logprob, ratio, advantages, xp.exp(logprob) - xp.exp(old_logprob))


def dppo_kl(
    s: BandSettings, logprob: Numbers, old_logprob: Numbers, log_ratio: Numbers, ratio: Numbers, advantages: Numbers
) -> Surrogate:
    """DPPO with tokens left out by KL(old || new) of "this token or another", in nats, with the sign of the change
    (binary KL, arXiv 2602.04879, eq. 14)."""
    new, old = xp.exp(logprob), xp.exp(old_logprob)
    not_new, not_old = clamped(1 - new, 0.0, 1.0), clamped(1 - old, 0.0, 1.0)  # rounding leaves logprobs above 0
    gap = logprob - old_logprob
    divergence = not_old * xp.log((not_old + ALMOST_NOTHING) / (not_new + ALMOST_NOTHING)) - old * gap
    return dppo(s, logprob, ratio, advantages, xp.where(new > old, divergence, -divergence))


POLICY_LOSSES: Mapping[str, Callable[..., Surrogate]] = {
    f.__name__: f for f in (clip, penalty, dis, cispo, gspo, sapo, dppo_tv, dppo_kl)
}
BANDS: Mapping[str, tuple[float, float]] = {
    "dis": (0.8, 3.0), "cispo": (1.0, 4.0), "gspo": (3e-4, 4e-4), "dppo_tv": (0.2, 0.2), "dppo_kl": (0.05, 0.05),
}  # fmt: skip
"""band_low and band_high of the losses that have them, where nothing else is said: of SAO; ScaleRL (Khatri et al. 2025:
weights up to 5, none too small); GSPO; and of DPPO's users."""
