"""The algorithm as published: plain functions of whole tensors, differentiated by autograd.

The functions use no product code except the weights of an aggregation. Arguments have the names of the arguments of
the product. Tensors are (B, T) or packed (N,), and masked positions may contain any value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algo.aggregation import Aggregation, token_weights
from tests.support.oracles import policy_losses
from tests.support.oracles.kernels import masked_whiten_stats

LOG_RATIO_LIMIT = 20.0
_K3_LIMIT = 10.0
_EPS = 1e-8
_ALIASES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def clean(values: Tensor, mask: Tensor) -> Tensor:
    """Set masked positions to 0."""
    return values.masked_fill(~mask, 0.0)


def masked_whiten(*, values: Tensor, mask: Tensor) -> Tensor:
    """Return (values - mean) / sqrt(population variance + 1e-8) at valid positions, and 0 elsewhere."""
    count, mean, m2 = masked_whiten_stats(values, mask)
    white = (clean(values, mask) - mean) * torch.rsqrt(m2 / count.clamp(min=1) + _EPS)
    return clean(white, mask).to(values.dtype)


def compute_gae(*, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the valid tokens. Masked tokens have no effect.

    The recursion runs from the last token to the first, with (n, g) = (next value, running advantage) and m the mask:
    n' = (1-m) n + m v,  g' = (1-m+m gamma lam) g + m gamma n + m (r - v). After the last token, n and g are 0.
    Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE", eq. 16.

    Args:
        rewards, values: (B, T) float32 or float64.
        mask: (B, T) bool; may have holes (turns of a conversation that are not from the policy).

    Returns:
        advantages (not whitened) and returns = advantages + values, both (B, T), 0 at masked positions.
    """
    values_BT = clean(values, mask)
    # (T, B): each step of the recursion reads contiguous memory.
    values_TB = values_BT.T.contiguous()
    mask_TB = mask.T.to(values.dtype)
    surplus_TB = (clean(rewards, mask) - values_BT).T.contiguous()
    decay_TB = 1 - mask_TB + mask_TB * (gamma * lam)
    bootstrap_TB = mask_TB * gamma
    advantages_TB = torch.empty_like(values_TB)
    following = torch.zeros_like(values_TB[0]) if len(values_TB) else values_TB.new_zeros(0)
    running = torch.zeros_like(following)
    for t in range(len(values_TB) - 1, -1, -1):
        running = torch.addcmul(surplus_TB[t], bootstrap_TB[t], following).addcmul_(decay_TB[t], running)
        following = torch.lerp(following, values_TB[t], mask_TB[t])
        advantages_TB[t] = running
    advantages_BT = clean(advantages_TB.T.contiguous(), mask)
    return advantages_BT, advantages_BT + values_BT


def kl_penalty(*, logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at each token from samples of the policy.

    With d = logprob - ref_logprob: `kl` (k1) d; `abs` |d|; `mse` (k2) d^2 / 2; `low_var_kl` (k3) e^-d - 1 + d
    (Schulman, "Approximating KL Divergence", 2020), with d clamped to +-20 before exp and the result to +-10.

    Args:
        logprob, ref_logprob: tensors of the same shape, in nats.
        kind: any name of the estimator.

    Returns:
        A tensor of the same shape, in nats, differentiable in `logprob`.
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
    raise AssertionError(kind)


def aggregate(
    *, loss: Tensor, mask: Tensor, mode: Aggregation, total_tokens: int | None = None,
    total_sequences: int | None = None, norm_tokens: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the sum of weights * loss with the weights of `token_weights`, a scalar."""
    weights = token_weights(
        mask=mask, mode=mode, total_tokens=total_tokens, total_sequences=total_sequences, norm_tokens=norm_tokens
    )
    return (weights * clean(loss, mask)).sum()


@dataclass(frozen=True)
class Loss:
    """`loss` is the optimised scalar. `metrics` are detached sums over the valid positions."""

    loss: Tensor
    metrics: dict[str, Tensor]
    """Of a policy loss: clipfrac, clipfrac_lower, ppo_kl (k1 of KL(old || new)), ppo_kl_k3, ratio, entropy, ref_kl and
    count. ratio_max is a maximum. pg_loss, entropy_loss, kl_loss and nll_loss are the weighted terms of the loss."""


def _clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO-clip per token (Schulman et al. 2017, eq. 7; dual clip: Ye et al. 2020, eq. 5), as a loss.

    Returns the loss, a mask of clipped tokens, and a mask of tokens at the dual-clip bound.
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
    *, logprob: Tensor, old_logprob: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor, clip_low: float = 0.2,
    clip_high: float = 0.2, dual_clip: float | None = None, policy_loss: str = "clip", penalty_coef: float = 0.0,
    entropy: Tensor | None = None, entropy_coef: float = 0.0, ref_logprob: Tensor | None = None, kl: str = "low_var_kl",
    kl_coef: float = 0.0, importance_weights: Tensor | None = None, nll_weights: Tensor | None = None,
    sequences: Tensor | None = None, **band: float,
) -> Loss:  # fmt: skip
    """Policy loss: sum of weights * (importance * objective - entropy_coef * entropy + kl_coef * KL(policy||ref))
    - nll_weights * logprob.

    Args:
        logprob, old_logprob, ref_logprob: log-probabilities of the sampled tokens, nats.
        advantages, weights: one per token. The weights of `token_weights` are the only normalisation.
        mask: bool; positions with False change neither loss nor gradient.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound c > 1 of the objective for negative advantages.
        policy_loss: `clip`, or `penalty` (PPO with a KL penalty, Schulman et al. 2017, eq. 8: -ratio * A +
            penalty_coef * KL(old || new), estimated by k3 on samples of the old policy).
        entropy: of the distribution at each token, nats; only measured if entropy_coef is 0.
        sequences: number of the sequence of each token.
        band: settings of the losses in `policy_losses`.
        importance_weights: constants from `correction.importance_weights`.
    """
    logprob, advantages = clean(logprob, mask), clean(advantages, mask)
    log_ratio = (logprob - clean(old_logprob, mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    below = above = is_bounded = torch.zeros_like(mask)
    if policy_loss == "penalty":
        objective = -ratio * advantages + penalty_coef * (ratio - 1 - log_ratio)
        is_clipped, place, weight = below, log_ratio.sigmoid(), torch.where(log_ratio.abs() < 20, ratio, 0.0)
    elif policy_loss == "clip":
        objective, is_clipped, is_bounded = _clipped_objective(ratio, advantages, clip_low, clip_high, dual_clip)
        below, above = is_clipped & (ratio < 1), is_clipped & (ratio > 1)
        place = (ratio.clamp(1 - clip_low, 1 + clip_high) - 1 + clip_low) / (clip_low + clip_high)
        weight = slope_of(objective, logprob) / -advantages
    else:
        objective, below, above, is_bounded, place = policy_losses.surrogate(
            policy_loss, logprob, clean(old_logprob, mask), advantages, mask, sequences, **band
        )
        is_clipped, weight = below | above, slope_of(objective, logprob) / -advantages
    if importance_weights is not None:
        importance_weights = clean(importance_weights, mask).detach()
        objective, weight = objective * importance_weights, weight * importance_weights
    weights = clean(weights, mask)
    entropy = torch.zeros_like(logprob) if entropy is None else clean(entropy, mask)
    ref_kl = torch.zeros_like(logprob)
    if ref_logprob is not None:
        ref_kl = kl_penalty(logprob=logprob, ref_logprob=clean(ref_logprob, mask), kind=kl)
    losses = (objective, -entropy_coef * entropy, kl_coef * ref_kl)
    pg_loss, entropy_loss, kl_loss = ((weights * x).sum() for x in losses)
    metrics = _ratio_metrics(log_ratio, mask, is_clipped, is_bounded)
    metrics |= _detached_sums({"entropy": entropy, "ref_kl": ref_kl, "count": mask})
    bands = {"masked_below": below & mask, "masked_above": above & mask, "band_position": clean(place, mask)}
    _, mean, m2 = masked_whiten_stats(weight.detach(), mask)
    metrics |= _detached_sums(bands) | {"token_weight.mean": mean, "token_weight.m2": m2}
    nll_loss = -(clean(nll_weights, mask) * logprob).sum() if nll_weights is not None else torch.zeros_like(pg_loss)
    terms = {"pg_loss": pg_loss, "entropy_loss": entropy_loss, "kl_loss": kl_loss, "nll_loss": nll_loss}
    metrics |= {name: term.detach() for name, term in terms.items()}
    loss = pg_loss + entropy_loss + kl_loss + nll_loss
    return Loss(loss, metrics | {"loss": loss.detach()})


def slope_of(objective: Tensor, logprob: Tensor) -> Tensor:
    """Return the derivative of the objective of each token with respect to its log-probability."""
    return torch.autograd.grad(objective.sum(), logprob, retain_graph=True)[0]


def _ratio_metrics(log_ratio: Tensor, mask: Tensor, is_clipped: Tensor, is_bounded: Tensor) -> dict[str, Tensor]:
    """Return sums that measure the distance of the policy from the old policy. `log_ratio` is 0 at masked positions."""
    ratio = log_ratio.detach().exp()
    sums = {
        "clipfrac": is_clipped & mask, "clipfrac_lower": is_bounded & mask, "ppo_kl": -log_ratio,
        "ppo_kl_k3": ratio - 1 - log_ratio, "ratio": clean(ratio, mask),
    }  # fmt: skip
    return _detached_sums(sums) | {"ratio_max": clean(ratio, mask).amax().float()}


def _detached_sums(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().sum().float() for name, x in values.items()}


def value_loss(
    *, values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, mask: Tensor,
    value_clip: float | None = None,
) -> Loss:  # fmt: skip
    """Value loss: sum of weights * max((v - R)^2, (v_clipped - R)^2) / 2, with v_clipped within old v +- value_clip.

    `metrics` are sums over valid positions of clipfrac and count. Source: code of Schulman et al. 2017 (baselines).
    """
    values, returns = clean(values, mask), clean(returns, mask)
    error = values - returns
    square = error.square()
    is_clipped = torch.zeros_like(mask)
    worst = square
    if value_clip is not None:
        old = clean(old_values, mask)
        clipped_square = (old + (values - old).clamp(-value_clip, value_clip) - returns).square()
        # Within the clip, the two squares differ only by rounding.
        is_clipped = ((values - old).abs() > value_clip) & (clipped_square > square)
        worst = torch.maximum(square, clipped_square)
    loss = 0.5 * (clean(weights, mask) * worst).sum()
    metrics = _detached_sums({"clipfrac": is_clipped, "count": mask})
    return Loss(loss, metrics | {"loss": loss.detach()})
