"""Policy and value losses. They return weighted sums and counts; the weights carry the one global division.

`token_weights` gives weights whose losses, summed over microbatches and ranks, are the loss of the global minibatch.
Arguments of the losses may have any one shape, (B, T) or packed (N,).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megappo.algo.advantages import whiten_stats
from megappo.algo.kl import LOG_RATIO_LIMIT, kl_penalty
from megappo.algo.masks import check_mask, clean

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
"""How token losses become one number."""


def token_weights(
    *,
    mask: Tensor,
    mode: str,
    total_tokens: int | None = None,
    total_sequences: int | None = None,
    norm_tokens: int | None = None,
) -> Tensor:
    """(B, T) float32 weights w such that the loss is the sum of w * token loss; 0 at masked positions.

    `token-mean`: 1 / tokens. `seq-mean-token-sum`: 1 / sequences. `seq-mean-token-mean`: 1 / (sequences * tokens of
    the sequence). `seq-mean-token-sum-norm`: 1 / (sequences * norm_tokens), Liu et al. 2025, "Dr. GRPO".

    Args:
        mask: (B, T) bool, this rank's part of the minibatch.
        total_tokens, total_sequences: counts of the global minibatch (sequences with at least one valid token);
            default: of this mask.
        norm_tokens: the constant of the last mode; default: T.

    Raises ValueError for an unknown mode.
    """
    check_mask(mask)
    tokens_B = mask.sum(-1)
    tokens = total_tokens if total_tokens is not None else int(tokens_B.sum())
    sequences = total_sequences if total_sequences is not None else int((tokens_B > 0).sum())
    tokens, sequences = max(tokens, 1), max(sequences, 1)
    weights = mask.to(torch.float32)
    match mode:
        case "token-mean":
            return weights / tokens
        case "seq-mean-token-sum":
            return weights / sequences
        case "seq-mean-token-mean":
            return weights / (sequences * tokens_B.clamp(min=1)[:, None])
        case "seq-mean-token-sum-norm":
            return weights / (sequences * (norm_tokens if norm_tokens is not None else mask.shape[-1]))
    raise ValueError(f"'{mode}' is not an aggregation; choose one of {', '.join(AGGREGATIONS)}")


def aggregate(
    *,
    loss: Tensor,
    mask: Tensor,
    mode: str,
    total_tokens: int | None = None,
    total_sequences: int | None = None,
    norm_tokens: int | None = None,
) -> Tensor:
    """The sum of weights * loss with the weights of `token_weights`; a scalar."""
    check_mask(mask, loss=loss)
    weights = token_weights(
        mask=mask,
        mode=mode,
        total_tokens=total_tokens,
        total_sequences=total_sequences,
        norm_tokens=norm_tokens,
    )
    return (weights * clean(loss, mask)).sum()


@dataclass(frozen=True)
class PolicyLoss:
    """`loss` is what is optimised; `metrics` are detached sums over the valid positions (see `policy_loss`)."""

    loss: Tensor
    metrics: dict[str, Tensor]


def _clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO-clip per token (Schulman et al. 2017, eq. 7; dual clip: Ye et al. 2020, eq. 5), as a loss.

    Returns the loss, where the clip was active, and where the dual clip was.
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    if dual_clip is None:
        return objective, is_clipped, torch.zeros_like(is_clipped)
    bound = -advantages * dual_clip
    is_bounded = (advantages < 0) & (bound < objective)
    return torch.where(is_bounded, bound, objective), is_clipped, is_bounded


def policy_loss(
    *,
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kind: Literal["clip", "penalty"] = "clip",
    penalty_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    ref_logprob: Tensor | None = None,
    kl_kind: str = "low_var_kl",
    kl_coef: float = 0.0,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """Policy loss: sum of weights * (importance * objective - entropy_coef * entropy + kl_coef * KL(policy||ref)).

    Args:
        logprob, old_logprob, ref_logprob: log-probabilities of the sampled tokens, nats.
        advantages: one per token.
        weights: from `token_weights`; the only normalisation.
        mask: bool; positions that are False change neither loss nor gradient.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound c > 1 of the objective where the advantage is negative.
        kind: `clip`, or `penalty` (PPO with a KL penalty, Schulman et al. 2017, eq. 8: -ratio * A + penalty_coef *
            KL(old || new), estimated by k3 on samples of the old policy).
        entropy: of the distribution at each token, nats; only measured where entropy_coef is 0.
        importance_weights: constants from `correction.importance_weights`.

    Returns:
        `metrics`: sums over valid positions of clipfrac, clipfrac_lower, ppo_kl (k1 of KL(old || new)), ppo_kl_k3,
        ratio, entropy, ref_kl and count; ratio_max is a maximum; pg_loss, entropy_loss and kl_loss are the weighted
        terms of the loss.
    """
    check_mask(mask, logprob=logprob, old_logprob=old_logprob, advantages=advantages, weights=weights)
    check_mask(mask, entropy=entropy, ref_logprob=ref_logprob, importance_weights=importance_weights)
    logprob, advantages = clean(logprob, mask), clean(advantages, mask)
    log_ratio = (logprob - clean(old_logprob, mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    if kind == "penalty":
        objective = -ratio * advantages + penalty_coef * (ratio - 1 - log_ratio)
        is_clipped = is_bounded = torch.zeros_like(mask)
    else:
        objective, is_clipped, is_bounded = _clipped_objective(ratio, advantages, clip_low, clip_high, dual_clip)
    if importance_weights is not None:
        objective = objective * clean(importance_weights, mask).detach()
    weights = clean(weights, mask)
    nothing = torch.zeros_like(logprob)
    entropy = clean(entropy, mask) if entropy is not None else nothing
    ref_kl = nothing
    if ref_logprob is not None:
        ref_kl = kl_penalty(logprob=logprob, ref_logprob=clean(ref_logprob, mask), kind=kl_kind)
    pg_loss, entropy_loss, kl_loss = (
        (weights * x).sum() for x in (objective, -entropy_coef * entropy, kl_coef * ref_kl)
    )
    metrics = _ratio_metrics(log_ratio, mask, is_clipped, is_bounded)
    metrics |= _detached_sums({"entropy": entropy, "ref_kl": ref_kl, "count": mask})
    metrics |= {"pg_loss": pg_loss.detach(), "entropy_loss": entropy_loss.detach(), "kl_loss": kl_loss.detach()}
    return PolicyLoss(pg_loss + entropy_loss + kl_loss, metrics)


def _ratio_metrics(log_ratio: Tensor, mask: Tensor, is_clipped: Tensor, is_bounded: Tensor) -> dict[str, Tensor]:
    """Sums that tell how far the policy went from the old one; `log_ratio` is 0 at masked positions."""
    ratio = log_ratio.detach().exp()
    sums = {
        "clipfrac": is_clipped & mask,
        "clipfrac_lower": is_bounded & mask,
        "ppo_kl": -log_ratio,
        "ppo_kl_k3": ratio - 1 - log_ratio,
        "ratio": clean(ratio, mask),
    }
    return _detached_sums(sums) | {"ratio_max": clean(ratio, mask).amax().float()}


def _detached_sums(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().sum().float() for name, x in values.items()}


@dataclass(frozen=True)
class ValueLoss:
    """`loss` is what is optimised; `metrics` are detached sums over the valid positions (see `value_loss`)."""

    loss: Tensor
    metrics: dict[str, Tensor]


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    mask: Tensor,
    clip: float | None = None,
) -> ValueLoss:
    """Value loss: sum of weights * max((v - R)^2, (v_clipped - R)^2) / 2, v_clipped within +-clip of the old value.

    `metrics`: sums over valid positions of clipfrac, value and count; mean and m2 (`WhitenStats`) of returns and of
    errors (value - return), from which explained variance follows over any union of batches. Schulman et al. 2017's
    reference code (baselines).
    """
    check_mask(mask, values=values, old_values=old_values, returns=returns, weights=weights)
    values, returns = clean(values, mask), clean(returns, mask)
    error = values - returns
    square = error.square()
    is_clipped = torch.zeros_like(mask)
    worst = square
    if clip is not None:
        old = clean(old_values, mask)
        clipped_square = (old + (values - old).clamp(-clip, clip) - returns).square()
        # Within the clip the two squares differ by rounding only.
        is_clipped = ((values - old).abs() > clip) & (clipped_square > square)
        worst = torch.maximum(square, clipped_square)
    loss = 0.5 * (clean(weights, mask) * worst).sum()
    metrics = _detached_sums({"clipfrac": is_clipped, "value": values, "count": mask})
    for name, numbers in (("return", returns), ("error", error)):
        stats = whiten_stats(values=numbers.detach(), mask=mask)
        metrics |= {f"{name}_mean": stats.mean, f"{name}_m2": stats.m2}
    return ValueLoss(loss, metrics)
