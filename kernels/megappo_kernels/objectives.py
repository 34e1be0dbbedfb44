"""Declarations of PPO's objectives: the loss of a token, its derivatives ("slopes"), and the reported metrics.

`policy_loss` and `value_loss` use only operations that torch and Triton's language share: operators, `xp.where`,
`xp.exp`, `xp.abs`, `xp.zeros_like`. `losses` runs the functions on tensors of any shape. `gpu.objectives` compiles
the same source. Arguments are the settings `s` and the numbers of a token by name. Missing optional numbers are
None. Slopes are formulas instead of autograd, because the output layer needs slopes as soon as the log-probability
of a token is computed.

The module imports torch only when a function is called, so that settings and documents can use these declarations.
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
    LossSettings,
    Numbers,
    Surrogate,
    clamped,
    xp,
)

K3_LIMIT = 10.0
"""Limit of the k3 estimate of the KL, as for `low_var_kl` in verl (verl/trainer/ppo/core_algos.py)."""


class Metric(NamedTuple):
    """Aggregation and description of a reported number."""

    kind: Literal["term", "mean", "largest", "spread", "derived"]
    """Aggregation: a weighted term of the loss; the mean over tokens; the maximum over tokens; mean and sum of
    squared deviations; a number derived from them. Deviations from the mean are used because raw moments lose the
    spread if it is small compared with the mean."""
    unit: str = ""
    meaning: str = ""
    healthy: str = ""
    """Expected values in a healthy run."""


@functools.cache
def _tuple_type(name: str, names: tuple[str, ...]) -> Any:
    """Return the named tuple type with these names. Triton supports named tuples, but neither dictionaries nor
    dataclasses."""
    return namedtuple(name, names)


# -- KL(policy || reference) --
# Estimates from samples of the policy, with gap = logprob - ref_logprob in nats, and their slopes in `logprob`.
# Schulman, "Approximating KL Divergence", 2020.


def k1(gap: Numbers) -> tuple[Numbers, Numbers]:
    """Compute k1: the gap."""
    return gap, 1.0


def absolute(gap: Numbers) -> tuple[Numbers, Numbers]:
    """Compute abs: the absolute value of the gap."""
    return xp.abs(gap), xp.where(gap > 0, 1.0, xp.where(gap < 0, -1.0, 0.0))


def k2(gap: Numbers) -> tuple[Numbers, Numbers]:
    """Compute k2: half the square of the gap."""
    return 0.5 * (gap * gap), gap


def k3(gap: Numbers) -> tuple[Numbers, Numbers]:
    """Compute k3: e^-gap - 1 + gap. The estimate is never negative and has the same expectation as k1."""
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
    """Estimate KL(policy || reference) at each token in nats, from gap = logprob - ref_logprob of sampled tokens."""
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
        "Mean position in the band, clamped: 0 at the lower edge, 1 at the upper edge. Losses without a band report "
        "another number between 0 and 1, such as the gate of `sapo`.",
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
"""Result of a formula for each token: the slopes in its trained numbers, and its metrics."""
OwnLoss: TypeAlias = Callable[..., Numbers | tuple[Numbers, Mapping[str, Numbers]]]
"""Custom policy loss; see `own_losses`."""


class PolicySettings(Protocol):
    """Settings of `policy_loss`, with functions instead of names, and `LossSettings`."""

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
    """Compute weights * (importance * surrogate - entropy_coef * entropy + kl_coef * KL(policy || reference)) -
    nll_weights * logprob.

    `sequence_log_ratio` is the mean log-ratio of the token's sequence. In the surrogate it replaces the log-ratio of
    the token. Returns the slopes in `logprob` and `entropy`, and PolicyMetrics.
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
"""Keyword arguments of a custom policy loss. The loss receives those that it has parameters for; see `own_losses`."""


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
    """Compute weights * max((v - R)^2, (v_clipped - R)^2) / 2, with v_clipped within +-value_clip of the old value.

    Returns the slope in `values`, and ValueMetrics. Source: reference code of Schulman et al. 2017 (baselines).
    """
    errors = values - returns
    square, slope, is_clipped = errors * errors, errors, xp.zeros_like(values)
    if s.value_clip is not None:
        step = values - old_values
        limited = old_values + clamped(step, -s.value_clip, s.value_clip) - returns
        # Within the clip, the two squares differ only by rounding.
        is_clipped = (xp.abs(step) > s.value_clip) & (limited * limited > square)
        square, slope = xp.where(is_clipped, limited * limited, square), xp.where(is_clipped, 0.0, slope)
    return (weights * slope,), ValueMetrics(loss=0.5 * weights * square, clipfrac=is_clipped)


# -- Their settings --


@dataclass(frozen=True)
class Objective:
    """Formula with its settings by name."""

    formula: ClassVar[Callable[..., Contribution]]
    """Function of a token's contribution. The parameters after `s` are the numbers of a token."""
    trained: ClassVar[tuple[str, ...]]
    """Numbers with slopes in the formula."""
    metrics: ClassVar[tuple[str, ...]]

    def __init_subclass__(
        cls, formula: Callable[..., Contribution], trained: tuple[str, ...], metrics: type[NamedTuple]
    ) -> None:
        cls.formula, cls.trained, cls.metrics = staticmethod(formula), trained, metrics._fields

    def settings(self) -> NamedTuple:
        """Return the settings `s` of the formula, with functions instead of names."""
        fields_by_name = {field.name: getattr(self, field.name) for field in fields(self)}
        resolved = {
            n: named_function(n, x) if n in FUNCTIONS and isinstance(x, str) else x for n, x in fields_by_name.items()
        }
        settings: NamedTuple = _tuple_type(f"{type(self).__name__}Settings", tuple(resolved))(**resolved)
        return settings


@dataclass(frozen=True)
class PolicyObjective(
    LossSettings, Objective, formula=policy_loss, trained=("logprob", "entropy"), metrics=PolicyMetrics
):
    """Settings of `policy_loss`. The defaults are PPO-clip."""

    policy_loss: str | OwnLoss = "clip"
    """Name in POLICY_LOSSES, or a custom function (see `own_losses`)."""
    entropy_coef: float = 0.0
    kl: str = "low_var_kl"
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        self.settings()
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip}, must exceed 1; pass None for none")

    @property
    def sees_sequences(self) -> bool:
        """Whether the slope of a token depends on the other tokens of its sequence."""
        if callable(self.policy_loss):
            return "sequence_mean" in taken_by(self.policy_loss, OFFERED)
        return POLICY_LOSSES[self.policy_loss].sees_sequences

    @property
    def slopes_in_entropy(self) -> bool:
        """Whether the loss depends on the entropy."""
        own = callable(self.policy_loss) and "entropy" in taken_by(self.policy_loss, OFFERED)
        return own or self.entropy_coef != 0


@dataclass(frozen=True)
class ValueObjective(Objective, formula=value_loss, trained=("values",), metrics=ValueMetrics):
    """Settings of `value_loss`."""

    value_clip: float | None = None
    """Range of the value clip. None: no clipping, and `old_values` are not used."""


FUNCTIONS: Mapping[str, Mapping[str, Callable[..., tuple[Numbers, ...]]]] = {
    "policy_loss": {name: loss.formula for name, loss in POLICY_LOSSES.items()},
    "kl": KL_ESTIMATES,
}
"""Settings that name a function, with the functions by name."""


def named_function(setting: str, name: str) -> Callable[..., tuple[Numbers, ...]]:
    """Return the function with this name for a setting. Raises ValueError with the nearest name."""
    choices = FUNCTIONS[setting]
    if name not in choices:
        nearest = difflib.get_close_matches(name, choices, n=1, cutoff=0.0)[0]
        raise ValueError(f"{setting} is '{name}', must be one of {', '.join(choices)}; did you mean '{nearest}'?")
    return choices[name]


def inputs_of(formula: Callable[..., Contribution]) -> dict[str, bool]:
    """Return the numbers of a token that a formula requires or accepts, in order. The values are true for required
    numbers."""
    parameters = list(inspect.signature(formula).parameters.values())[1:]
    return {p.name: p.default is inspect.Parameter.empty for p in parameters}


def metric_kind(name: str) -> str:
    """Return the aggregation of a metric. Metrics without a declaration use the mean."""
    metric = POLICY_METRICS.get(name) or VALUE_METRICS.get(name)
    return metric.kind if metric is not None else "mean"


def taken_by(function: Callable[..., Numbers], offered: Sequence[str]) -> tuple[str, ...]:
    """Return the offered keyword arguments that the function accepts."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in offered if takes_any or name in parameters)
