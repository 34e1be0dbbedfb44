"""PPO's objectives, declared once: what a token adds to a loss, its derivatives ("slopes"), and the reported metrics.

`policy_loss` and `value_loss` are written in the vocabulary that torch and Triton's language share: operators,
`xp.where`, `xp.exp`, `xp.abs`, `xp.zeros_like`. `losses` runs them on tensors of any shape, `gpu.objectives` compiles
the same source. Their arguments are the settings `s` and a token's numbers by name; optional numbers that are not given
are None. Slopes are formulas, not autograd: the output layer needs them as soon as a token's log-probability is known.

Nothing here imports torch before it is called, so that settings and documents can be built from these declarations.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from megappo_kernels.surrogates import (
    LOG_RATIO_LIMIT,
    POLICY_LOSSES,
    BandSettings,
    Numbers,
    Surrogate,
    clamped,
    xp,
)

K3_LIMIT = 10.0
"""The k3 estimate of the KL is clamped to this, as verl clamps `low_var_kl` (verl/trainer/ppo/core_algos.py)."""


class Metric(NamedTuple):
    """How a reported number is combined, and what it means."""

    kind: Literal["term", "mean", "largest", "spread", "derived"]
    """How values are combined: a weighted term of the loss; the mean over tokens; the largest of any token; mean and
    sum of squared deviations; derived from those (moments that are not centred lose a spread that is small beside the
    mean)."""
    unit: str = ""
    meaning: str = ""
    healthy: str = ""
    """What to expect of a healthy run."""


@functools.cache
def _tuple_type(name: str, names: tuple[str, ...]) -> Any:
    """Named tuple type of these names. Triton knows named tuples, but neither dictionaries nor dataclasses."""
    return namedtuple(name, names)


# -- KL(policy || reference) --
# Estimates from samples of the policy by gap = logprob - ref_logprob, in nats, and their slopes in `logprob`.
# Schulman, "Approximating KL Divergence", 2020.


def k1(gap: Numbers) -> tuple[Numbers, Numbers]:
    """k1: the gap itself."""
    return gap, 1.0


def absolute(gap: Numbers) -> tuple[Numbers, Numbers]:
    """abs: the absolute value of the gap."""
    return xp.abs(gap), xp.where(gap > 0, 1.0, xp.where(gap < 0, -1.0, 0.0))


def k2(gap: Numbers) -> tuple[Numbers, Numbers]:
    """k2: half the square of the gap."""
    return 0.5 * (gap * gap), gap


def k3(gap: Numbers) -> tuple[Numbers, Numbers]:
    """k3: e^-gap - 1 + gap, never below 0 and with the expectation of k1."""
    near = clamped(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    shrunk = xp.exp(-near)
    estimate = shrunk - 1 + near
    outside = (xp.abs(gap) > LOG_RATIO_LIMIT) | (estimate > K3_LIMIT)
    return xp.where(estimate > K3_LIMIT, K3_LIMIT, estimate), xp.where(outside, 0.0, 1 - shrunk)


KLKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KL_ESTIMATES: Mapping[str, Callable[[Numbers], tuple[Numbers, Numbers]]] = {
    "kl": k1, "k1": k1, "abs": absolute, "mse": k2, "k2": k2, "low_var_kl": k3, "k3": k3,
}  # fmt: skip


def kl_estimate(gap: Numbers, kind: str) -> Numbers:
    """KL(policy || reference) at each token in nats, from gap = logprob - ref_logprob of tokens that the policy
    sampled."""
    return named_function("kl", kind)(gap)[0]


# -- The policy --


POLICY_METRICS: Mapping[str, Metric] = {
    "loss": Metric("term", "1", "Whole policy loss: the sum of the next four.", "no trend is needed"),
    "pg_loss": Metric(
        "term", "1", "Policy gradient part with clipping or penalty, times correction weights.", "near 0, mostly below"
    ),
    "entropy_loss": Metric("term", "1", "Minus the entropy times `algorithm.entropy_coef`.", "small beside pg_loss"),
    "kl_loss": Metric("term", "1", "KL to the reference times `algorithm.kl_in_loss.coef`.", "small beside pg_loss"),
    "nll_loss": Metric(
        "term", "1", "Negative log-likelihood of good samples times `algorithm.positive_nll_coef`.", "falls slowly"
    ),
    "clipfrac": Metric(
        "mean", "fraction", "Tokens outside the band: `masked_below` and `masked_above` together.",
        "0.01 to 0.3; advice above 0.5",
    ),
    "clipfrac_lower": Metric(
        "mean", "fraction", "Tokens at the bound of `algorithm.dual_clip`; 0 unless the policy loss is `clip`.",
        "near 0",
    ),
    "ppo_kl": Metric(
        "mean", "nats per token", "KL(old || new), estimate k1 of log-ratios within +-20; may be below 0.",
        "below 0.05",
    ),
    "ppo_kl_k3": Metric(
        "mean", "nats per token",
        "KL(old || new), estimate k3 of log-ratios within +-20; never below 0. Unlike other k3 estimates, no token is "
        "limited to 10.",
        "below 0.05",
    ),
    "ratio": Metric("mean", "1", "Mean ratio new / old probability, from log-ratios within +-20.", "0.95 to 1.05"),
    "ratio_max": Metric("largest", "1", "Largest of these ratios.", "below 10"),
    "entropy": Metric(
        "mean", "nats per token", "Entropy of the policy at the sampling temperature.", "falls slowly, stays above 0"
    ),
    "masked_below": Metric(
        "mean", "fraction",
        "Tokens below the band of the loss, which are clipped or left out (`cispo` clamps their weights). `dis` and "
        "`cispo` count all of these tokens. Other losses count only tokens with a negative advantage.",
        "below 0.1; advice above 0.2 for losses that leave out tokens",
    ),
    "masked_above": Metric(
        "mean", "fraction",
        "Tokens above the band of the loss. `dis` and `cispo` count all of these tokens. Other losses count only "
        "tokens with a positive advantage.",
        "below 0.1; see `actor/masked_below`",
    ),
    "band_position": Metric(
        "mean", "1",
        "Mean position in the band, clamped: 0 at the lower edge, 1 at the upper edge. With `sapo` the gate, with "
        "`penalty` ratio / (1 + ratio).",
        "steady, near where a ratio of 1 lies",
    ),
    "token_weight": Metric("spread"),
    "effective_sample_size": Metric(
        "derived", "fraction",
        "(sum of w)^2 / (tokens x sum of w^2) over the tokens that the loss counts. w: the factor on the advantage in "
        "the slope, correction weight included, `loss_aggregation` not; 0 for clipped tokens.",
        "above 0.5; 1 before the first update if no correction is used",
    ),
    "ref_kl": Metric(
        "mean", "nats per token",
        "KL to the reference by `kl_in_loss.kind`, or k3 without `kl_in_loss`; 0 without a reference.", "below 0.5",
    ),
}  # fmt: skip
Contribution: TypeAlias = tuple[tuple[Numbers, ...], NamedTuple]
"""What a formula finds for each token: the slopes in its trained numbers, and its metrics."""
OwnLoss: TypeAlias = Callable[..., Numbers | tuple[Numbers, Mapping[str, Numbers]]]
"""A policy loss of the user's own: see `own_losses`."""


class PolicySettings(BandSettings, Protocol):
    """Settings of `policy_loss`, with functions in place of their names."""

    entropy_coef: float
    kl_coef: float
    policy_loss: Callable[..., Surrogate]
    kl: Callable[[Numbers], tuple[Numbers, Numbers]]


class ValueSettings(Protocol):
    """Settings of `value_loss`."""

    value_clip: float | None


PolicyMetrics = _tuple_type(
    "PolicyMetrics", tuple(name for name in POLICY_METRICS if name not in ("loss", "effective_sample_size"))
)


def policy_loss(
    s: PolicySettings,
    logprob: Numbers,
    entropy: Numbers,
    old_logprob: Numbers,
    advantages: Numbers,
    weights: Numbers,
    ref_logprob: Numbers = None,
    importance_weights: Numbers = None,
    nll_weights: Numbers = None,
    sequence_log_ratio: Numbers = None,
) -> Contribution:
    """weights * (importance * surrogate - entropy_coef * entropy + kl_coef * KL(policy || reference)) - nll_weights *
    logprob.

    `sequence_log_ratio`: mean log-ratio of a token's sequence, which replaces the token's own in the surrogate. Returns
    the slopes in `logprob` and `entropy`, and PolicyMetrics.
    """
    gap = logprob - old_logprob
    log_ratio = clamped(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = xp.exp(log_ratio)
    shared, shared_ratio = log_ratio, ratio
    if sequence_log_ratio is not None:
        shared, shared_ratio = sequence_log_ratio, xp.exp(sequence_log_ratio)
    surrogate = s.policy_loss(s, logprob, old_logprob, shared, shared_ratio, advantages)
    loss, slope, weight = surrogate.loss, surrogate.slope, surrogate.weight
    if importance_weights is not None:
        loss, slope, weight = loss * importance_weights, slope * importance_weights, weight * importance_weights
    ref_kl = xp.zeros_like(logprob)
    if ref_logprob is not None:
        ref_kl, ref_slope = s.kl(logprob - ref_logprob)
        slope = slope + s.kl_coef * ref_slope
    slope, nll = weights * slope, xp.zeros_like(logprob)
    if nll_weights is not None:
        slope, nll = slope - nll_weights, -nll_weights * logprob
    metrics = PolicyMetrics(
        pg_loss=weights * loss,
        entropy_loss=-s.entropy_coef * weights * entropy,
        kl_loss=s.kl_coef * weights * ref_kl,
        nll_loss=nll,
        clipfrac=surrogate.clipfrac,
        clipfrac_lower=surrogate.clipfrac_lower,
        ppo_kl=-log_ratio,
        ppo_kl_k3=ratio - 1 - log_ratio,
        ratio=ratio,
        ratio_max=ratio,
        entropy=entropy,
        masked_below=surrogate.below,
        masked_above=surrogate.above,
        band_position=surrogate.position,
        token_weight=weight,
        ref_kl=ref_kl,
    )
    return (slope, -s.entropy_coef * weights), metrics


OFFERED = ("logprob", "old_logprob", "log_ratio", "advantages", "entropy", "ref_logprob", "sequence_mean")
"""Keyword arguments of a user's policy loss, as far as it has parameters for them: see `own_losses`."""


# -- The value --


VALUE_METRICS: Mapping[str, Metric] = {
    "loss": Metric("term", "score squared", "Value loss, a half included.", "falls, then follows the returns' spread"),
    "clipfrac": Metric(
        "mean", "fraction", "Tokens whose value moved beyond `critic.value_clip`, where the clipped error is larger.",
        "below 0.3",
    ),
}  # fmt: skip
ValueMetrics = _tuple_type("ValueMetrics", tuple(VALUE_METRICS))


def value_loss(
    s: ValueSettings, values: Numbers, old_values: Numbers, returns: Numbers, weights: Numbers
) -> Contribution:
    """weights * max((v - R)^2, (v_clipped - R)^2) / 2, with v_clipped within +-value_clip of the old value.

    Returns the slope in `values`, and ValueMetrics. Schulman et al. 2017's reference code (baselines).
    """
    errors = values - returns
    square, slope, is_clipped = errors * errors, errors, xp.zeros_like(values)
    if s.value_clip is not None:
        step = values - old_values
        limited = old_values + clamped(step, -s.value_clip, s.value_clip) - returns
        # Within the clip the two squares differ by rounding only.
        is_clipped = (xp.abs(step) > s.value_clip) & (limited * limited > square)
        square, slope = xp.where(is_clipped, limited * limited, square), xp.where(is_clipped, 0.0, slope)
    return (weights * slope,), ValueMetrics(loss=0.5 * weights * square, clipfrac=is_clipped)


# -- Their settings --


@dataclass(frozen=True)
class Objective:
    """An objective: a formula, and its settings by name."""

    formula: ClassVar[Callable[..., Contribution]]
    """Function of a token's contribution; its parameters after `s` name the numbers of a token."""
    trained: ClassVar[tuple[str, ...]]
    """Numbers that the formula has slopes in."""
    metrics: ClassVar[tuple[str, ...]]

    def __init_subclass__(
        cls, formula: Callable[..., Contribution], trained: tuple[str, ...], metrics: type[NamedTuple]
    ) -> None:
        cls.formula, cls.trained, cls.metrics = staticmethod(formula), trained, metrics._fields

    def settings(self) -> NamedTuple:
        """The settings `s` of the formula, with functions in place of their names."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        found = {n: named_function(n, x) if n in FUNCTIONS and isinstance(x, str) else x for n, x in given.items()}
        settings: NamedTuple = _tuple_type(f"{type(self).__name__}Settings", tuple(found))(**found)
        return settings


@dataclass(frozen=True)
class PolicyObjective(Objective, formula=policy_loss, trained=("logprob", "entropy"), metrics=PolicyMetrics):
    """Settings of `policy_loss`; the defaults are those of PPO-clip."""

    policy_loss: str | OwnLoss = "clip"
    """One of POLICY_LOSSES, or a function of your own: see `own_losses`."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None = None
    """Bound c > 1 of the loss where the advantage is negative."""
    penalty_coef: float = 0.0
    band_low: float = 0.2
    band_high: float = 0.2
    """Edges of the band of the losses in BANDS: the ratio from 1 - band_low to 1 + band_high, or a change down and
    up."""
    gate_positive: float = 1.0
    gate_negative: float = 1.05
    """Temperatures of `sapo`; the larger, the sooner a token's slope fades."""
    weight_cap: float = 20.0
    """Largest weight of a token with `dppo_tv` and `dppo_kl`."""
    entropy_coef: float = 0.0
    kl: str = "low_var_kl"
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        self.settings()
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip}, must exceed 1; pass None for none")

    @property
    def sees_sequences(self) -> bool:
        """Whether a token's slope depends on the other tokens of its sequence, so that all of them are needed first."""
        if callable(self.policy_loss):
            return "sequence_mean" in taken_by(self.policy_loss, OFFERED)
        return self.policy_loss == "gspo"

    @property
    def slopes_in_entropy(self) -> bool:
        """Whether the loss depends on the entropy."""
        own = callable(self.policy_loss) and "entropy" in taken_by(self.policy_loss, OFFERED)
        return own or self.entropy_coef != 0


@dataclass(frozen=True)
class ValueObjective(Objective, formula=value_loss, trained=("values",), metrics=ValueMetrics):
    """Settings of `value_loss`."""

    value_clip: float | None = None
    """Range of the value clip; None: no clipping, and the old values are not used."""


FUNCTIONS: Mapping[str, Mapping[str, Callable[..., tuple[Numbers, ...]]]] = {
    "policy_loss": POLICY_LOSSES,
    "kl": KL_ESTIMATES,
}
"""Settings whose values name a function, with the functions by name."""


def named_function(setting: str, name: str) -> Callable[..., tuple[Numbers, ...]]:
    """The function that a setting names; raises ValueError with the nearest name."""
    choices = FUNCTIONS[setting]
    if name not in choices:
        nearest = difflib.get_close_matches(name, choices, n=1, cutoff=0.0)[0]
        raise ValueError(f"{setting} is '{name}', must be one of {', '.join(choices)}; did you mean '{nearest}'?")
    return choices[name]


def inputs_of(formula: Callable[..., Contribution]) -> dict[str, bool]:
    """Numbers of a token that a formula takes, in its order, and whether each is required."""
    parameters = list(inspect.signature(formula).parameters.values())[1:]
    return {p.name: p.default is inspect.Parameter.empty for p in parameters}


def metric_kind(name: str) -> str:
    """How a metric is combined; the mean for metrics that no formula declares."""
    found = POLICY_METRICS.get(name) or VALUE_METRICS.get(name)
    return found.kind if found is not None else "mean"


def taken_by(function: Callable[..., Numbers], offered: Sequence[str]) -> tuple[str, ...]:
    """The offered keyword arguments that a function has parameters for; all where it takes any."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in offered if takes_any or name in parameters)
