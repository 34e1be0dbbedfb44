"""Policy and value losses of PPO with their gradients, in one pass over the tokens and without a host synchronisation.

The weights carry the only normalisation, so that every aggregation is a set of per-token weights and losses simply add
up over microbatches and ranks. Gradients are formulas, not autograd: ties and clamps are those of
`torch.maximum` and `torch.clamp` up to a set of measure zero. Arguments have any one shape.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megappo_kernels.backend import runs_triton
from megappo_kernels.whiten import masked_whiten_stats

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +- this before exp; outside, the gradient is 0."""
K3_LIMIT = 10.0
"""The k3 estimate of the KL is clamped to this."""

KL_KINDS = {"kl": 1, "k1": 1, "abs": 2, "mse": 3, "k2": 3, "low_var_kl": 4, "k3": 4}
"""KL(policy || reference) from samples: d, |d|, d^2 / 2 or e^-d - 1 + d, with d = logprob - ref_logprob."""

POLICY_METRICS = (
    "pg_loss",
    "entropy_loss",
    "kl_loss",
    "clipfrac",
    "clipfrac_lower",
    "ppo_kl",
    "ppo_kl_k3",
    "ratio",
    "entropy",
    "ref_kl",
    "count",
    "ratio_max",
)
VALUE_METRICS = ("clipfrac", "value", "count", "return_mean", "return_m2", "error_mean", "error_m2")
"""Sums, and of returns and errors (value - return) mean and sum of squared deviations over `count` tokens, which
`merge_whiten_stats` merges: moments that are not centred lose a spread that is small beside the mean."""


@dataclass(frozen=True)
class PolicyObjective:
    """What is optimised; the defaults are those of PPO-clip (Schulman et al. 2017, eq. 7)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None = None
    """Bound c > 1 of the objective where the advantage is negative (Ye et al. 2020, eq. 5)."""
    kind: Literal["clip", "penalty"] = "clip"
    """`penalty`: -ratio * A + penalty_coef * KL(old || new) by k3 (Schulman et al. 2017, eq. 8)."""
    penalty_coef: float = 0.0
    entropy_coef: float = 0.0
    kl_kind: str = "low_var_kl"
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.kl_kind not in KL_KINDS:
            nearest = difflib.get_close_matches(self.kl_kind, KL_KINDS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"'{self.kl_kind}' is not a KL estimator ({', '.join(KL_KINDS)}); did you mean '{nearest}'?"
            )
        if self.kind not in ("clip", "penalty"):
            raise ValueError(f"'{self.kind}' is not a policy loss; choose clip or penalty")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip}, must exceed 1; pass None for none")


@dataclass(frozen=True)
class PolicyInputs:
    """Per token, all of one shape."""

    old_logprob: Tensor
    """Log-probabilities under the policy before the updates, nats."""
    advantages: Tensor
    weights: Tensor
    """The only normalisation."""
    mask: Tensor
    """bool; positions that are False change nothing, whatever they hold."""
    ref_logprob: Tensor | None = None
    importance_weights: Tensor | None = None
    """Constants that multiply the objective."""

    def tensors(self) -> dict[str, Tensor]:
        """Those that are given, by name."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: x for name, x in named.items() if x is not None}

    def of_rows(self, rows: slice | Tensor) -> PolicyInputs:
        """Those of some of the tokens (1-d only)."""
        return PolicyInputs(**{name: x[rows] for name, x in self.tensors().items()})


@dataclass(frozen=True)
class Loss:
    """A differentiable scalar, and sums to report."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    """Detached scalars: sums over valid tokens, or weighted terms of the loss; names ending in `_max` are maxima, those
    in `_mean` and `_m2` statistics over `count` tokens."""


@dataclass(frozen=True)
class PolicyTerms:
    """The policy loss of some tokens with its gradients."""

    grad_logprob: Tensor
    grad_entropy: Tensor
    sums: Tensor
    """(len(POLICY_METRICS),) float64."""


def policy_terms(logprob: Tensor, entropy: Tensor, inputs: PolicyInputs, objective: PolicyObjective) -> PolicyTerms:
    """Weighted loss terms and gradients with respect to `logprob` and `entropy`, all of one shape; 0 where masked."""
    if runs_triton(logprob):
        from megappo_kernels.gpu.losses import launch_policy

        return launch_policy(logprob, entropy, inputs, objective)
    mask = inputs.mask
    lp, old, advantages, weights, entropy = (
        x.masked_fill(~mask, 0.0) for x in (logprob, inputs.old_logprob, inputs.advantages, inputs.weights, entropy)
    )
    gap = lp - old
    log_ratio = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    term, slope, is_clipped, is_bounded = _objective(log_ratio, ratio, advantages, objective)
    slope = slope.masked_fill_(gap.abs() > LOG_RATIO_LIMIT, 0.0)
    if inputs.importance_weights is not None:
        importance = inputs.importance_weights.masked_fill(~mask, 0.0)
        term, slope = term * importance, slope * importance
    ref_kl = torch.zeros_like(lp)
    if inputs.ref_logprob is not None:
        ref_gap = lp - inputs.ref_logprob.masked_fill(~mask, 0.0)
        ref_kl, ref_slope = _kl(ref_gap, KL_KINDS[objective.kl_kind])
        slope = slope + objective.kl_coef * ref_slope
    sums = [
        weights * term,
        -objective.entropy_coef * weights * entropy,
        objective.kl_coef * weights * ref_kl,
        is_clipped,
        is_bounded,
        -log_ratio,
        ratio - 1 - log_ratio,
        ratio * mask,
        entropy,
        ref_kl,
        mask,
    ]
    totals = [x.sum().double() for x in sums]
    totals.append((ratio * mask).amax().double() if ratio.numel() else totals[0])
    return PolicyTerms(weights * slope, -objective.entropy_coef * weights, torch.stack(totals))


def _objective(
    log_ratio: Tensor, ratio: Tensor, advantages: Tensor, objective: PolicyObjective
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per token: loss, its slope in logprob, whether the clip was active, whether the dual clip was."""
    if objective.kind == "penalty":
        loss = -ratio * advantages + objective.penalty_coef * (ratio - 1 - log_ratio)
        never = torch.zeros_like(ratio, dtype=torch.bool)
        return loss, -ratio * advantages + objective.penalty_coef * (ratio - 1), never, never
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    is_clipped = clipped > plain
    loss, slope = torch.where(is_clipped, clipped, plain), plain.masked_fill(is_clipped, 0.0)
    if objective.dual_clip is None:
        return loss, slope, is_clipped, torch.zeros_like(is_clipped)
    bound = -advantages * objective.dual_clip
    is_bounded = (advantages < 0) & (bound < loss)
    return torch.where(is_bounded, bound, loss), slope.masked_fill_(is_bounded, 0.0), is_clipped, is_bounded


def _kl(gap: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """(estimate, slope in logprob) by the numbers of KL_KINDS."""
    if kind == 1:
        return gap, torch.ones_like(gap)
    if kind == 2:
        return gap.abs(), gap.sign()
    if kind == 3:
        return gap.square() / 2, gap
    bounded = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    shrunk = (-bounded).exp()
    raw = shrunk - 1 + bounded
    outside = (gap.abs() > LOG_RATIO_LIMIT) | (raw > K3_LIMIT)
    return raw.clamp(max=K3_LIMIT), (1 - shrunk).masked_fill_(outside, 0.0)


def policy_loss(
    *,
    logprob: Tensor,
    inputs: PolicyInputs,
    entropy: Tensor | None = None,
    objective: PolicyObjective | None = None,
) -> Loss:
    """Sum of weights * (importance * objective - entropy_coef * entropy + kl_coef * KL(policy || reference)).

    Args:
        logprob: of the sampled tokens under the policy, nats, float32 or float64; any shape.
        inputs: the constants of each token, of the same shape.
        entropy: of the distribution at each token, nats; default: zeros.
        objective: default: PPO-clip with 0.2.

    Returns:
        The loss, differentiable in `logprob` and `entropy`, and POLICY_METRICS.

    Raises ValueError where shapes differ, TypeError where the mask is not bool.
    """
    _check(logprob, inputs.tensors() | ({} if entropy is None else {"entropy": entropy}))
    entropy = entropy if entropy is not None else torch.zeros_like(logprob)
    loss, sums = _PolicyLoss.apply(logprob, entropy, inputs, objective or PolicyObjective())
    return Loss(loss, policy_metrics(sums))


def policy_metrics(sums: Tensor) -> dict[str, Tensor]:
    """POLICY_METRICS by name."""
    return dict(zip(POLICY_METRICS, sums.unbind(), strict=True))


def policy_loss_of(sums: Tensor) -> Tensor:
    """The loss itself: the sum of its three weighted terms."""
    return sums[:3].sum()


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprob: Tensor, entropy: Tensor, inputs: PolicyInputs, objective: PolicyObjective
    ) -> tuple[Tensor, Tensor]:
        terms = policy_terms(logprob, entropy, inputs, objective)
        ctx.save_for_backward(terms.grad_logprob, terms.grad_entropy)
        ctx.mark_non_differentiable(terms.sums)
        return policy_loss_of(terms.sums).to(logprob.dtype), terms.sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprob, grad_entropy = ctx.saved_tensors
        return grads[0] * grad_logprob, grads[0] * grad_entropy, None, None


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    mask: Tensor,
    clip: float | None = None,
) -> Loss:
    """Sum of weights * max((v - R)^2, (v_clipped - R)^2) / 2, v_clipped within +-clip of the old value.

    Args:
        values: float32 or float64, any shape; the others have the same.
        mask: bool; positions that are False change nothing.
        clip: None: no clipping, and `old_values` are not used.

    Returns:
        The loss, differentiable in `values`, and VALUE_METRICS, from which explained variance follows over any union.

    Raises ValueError where shapes differ, TypeError where the mask is not bool.
    """
    given = {"old_values": old_values, "returns": returns, "weights": weights, "mask": mask}
    _check(values, given)
    loss, sums = _ValueLoss.apply(values, old_values, returns, weights, mask, clip)
    return Loss(loss, dict(zip(VALUE_METRICS, sums[1:].unbind(), strict=True)))


class _ValueLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if runs_triton(values):
            from megappo_kernels.gpu.losses import launch_value

            grad, sums = launch_value(values, *rest)
        else:
            grad, sums = _value_terms(values, *rest)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(sums)
        return sums[0].to(values.dtype), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grads[0] * grad, None, None, None, None, None


def _value_terms(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """(gradient, (1 + len(VALUE_METRICS),) float64: the loss and its metrics)."""
    values, returns, weights = (x.masked_fill(~mask, 0.0) for x in (values, returns, weights))
    error = values - returns
    square = error.square()
    is_clipped = torch.zeros_like(mask)
    worst = square
    if clip is not None:
        old = old_values.masked_fill(~mask, 0.0)
        step = values - old
        clipped_square = (old + step.clamp(-clip, clip) - returns).square()
        # Within the clip the two squares differ by rounding only.
        is_clipped = (step.abs() > clip) & (clipped_square > square)
        worst = torch.where(is_clipped, clipped_square, square)
    sums = torch.stack([x.sum().double() for x in (0.5 * weights * worst, is_clipped, values, mask)])
    spreads = [masked_whiten_stats(x, mask)[1:] for x in (returns, error)]
    return (weights * error).masked_fill_(is_clipped, 0.0), torch.cat([sums, *spreads])


def _check(first: Tensor, others: Mapping[str, Tensor]) -> None:
    for name, tensor in others.items():
        if tensor.shape != first.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {tuple(first.shape)}")
    if others["mask"].dtype != torch.bool:
        raise TypeError(f"mask has dtype {others['mask'].dtype}, must be torch.bool; pass mask.bool()")
