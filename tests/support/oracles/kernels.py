"""Simple reference implementations of all kernels, in the precision of their inputs.

The code is written for readability instead of speed: full logits, plain loops, autograd for gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_logits(
    logits_TV: Tensor, *, temperature: float | Tensor = 1.0, softcap: float | None = None,
    valid_vocab: int | None = None,
) -> Tensor:  # fmt: skip
    """Apply the soft cap, then the temperature, then -inf for padded vocabulary."""
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    logits_TV = logits_TV / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    if valid_vocab is not None:
        padded_V = torch.arange(logits_TV.shape[1], device=logits_TV.device) >= valid_vocab
        logits_TV = logits_TV.masked_fill(padded_V, -torch.inf)
    return logits_TV


def logits_logprob(
    logits_TV: Tensor, labels_T: Tensor, *, temperature: float | Tensor = 1.0, softcap: float | None = None,
    valid_vocab: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the log-probability of each label and the entropy of each row, in nats."""
    logits_TV = scaled_logits(logits_TV, temperature=temperature, softcap=softcap, valid_vocab=valid_vocab)
    logp_TV = torch.log_softmax(logits_TV, dim=-1)
    logprob_T = logp_TV.gather(-1, labels_T[:, None]).squeeze(-1)
    possible_TV = logp_TV > -torch.inf
    entropy_T = -(logp_TV.exp() * logp_TV.masked_fill(~possible_TV, 0.0)).sum(-1)
    return logprob_T, entropy_T


def linear_logprob(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, *, temperature: float | Tensor = 1.0,
    softcap: float | None = None, valid_vocab: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `logits_logprob` of hidden @ weight.T."""
    return logits_logprob(
        hidden_TH @ weight_VH.T, labels_T, temperature=temperature, softcap=softcap, valid_vocab=valid_vocab
    )


def policy_loss(
    *, logprob: Tensor, old_logprob: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor, entropy: Tensor,
    ref_logprob: Tensor | None = None, importance_weights: Tensor | None = None, nll_weights: Tensor | None = None,
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, policy_loss: str = "clip",
    penalty_coef: float = 0.0, entropy_coef: float = 0.0, kl: str = "low_var_kl", kl_coef: float = 0.0,
) -> Tensor:  # fmt: skip
    """Sum the policy loss over valid tokens in a loop."""
    loss = logprob.new_zeros(())
    for i in torch.nonzero(mask.flatten()).flatten().tolist():
        lp, old, advantage = (x.flatten()[i] for x in (logprob, old_logprob, advantages))
        log_ratio = (lp - old).clamp(-20, 20)
        ratio = log_ratio.exp()
        if policy_loss == "penalty":
            term = -ratio * advantage + penalty_coef * (ratio - 1 - log_ratio)
        else:
            term = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
            if dual_clip is not None and advantage < 0:
                term = torch.minimum(term, -advantage * dual_clip)
        if importance_weights is not None:
            term = term * importance_weights.flatten()[i]
        term = term - entropy_coef * entropy.flatten()[i]
        if ref_logprob is not None:
            term = term + kl_coef * kl_estimate(lp - ref_logprob.flatten()[i], kl)
        loss = loss + weights.flatten()[i] * term
        if nll_weights is not None:
            loss = loss - nll_weights.flatten()[i] * lp
    return loss


def kl_estimate(gap: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) from gap = logprob - ref_logprob, in nats."""
    match kind:
        case "kl" | "k1":
            return gap
        case "abs":
            return gap.abs()
        case "mse" | "k2":
            return gap.square() / 2
        case "low_var_kl" | "k3":
            bounded = gap.clamp(-20, 20)
            return ((-bounded).exp() - 1 + bounded).clamp(-10, 10)
    raise ValueError(f"'{kind}' is not a KL estimator")


def value_loss(
    *, values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, mask: Tensor,
    value_clip: float | None = None,
) -> Tensor:  # fmt: skip
    """Sum the value loss over valid tokens."""
    loss = values.new_zeros(())
    for i in torch.nonzero(mask.flatten()).flatten().tolist():
        value, old, target = (x.flatten()[i] for x in (values, old_values, returns))
        worst = (value - target).square()
        if value_clip is not None:
            worst = torch.maximum(worst, (old + (value - old).clamp(-value_clip, value_clip) - target).square())
        loss = loss + weights.flatten()[i] * worst / 2
    return loss


def gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute advantages and returns by the recursion, one number at a time, with 0 at masked positions."""
    advantages_BT, returns_BT = torch.zeros_like(values_BT), torch.zeros_like(values_BT)
    for b in range(len(values_BT)):
        following = bootstrap_B[b] if bootstrap_B is not None else values_BT.new_zeros(())
        running = values_BT.new_zeros(())
        for t in range(values_BT.shape[1] - 1, -1, -1):
            m = mask_BT[b, t].to(values_BT.dtype)
            if m == 0:
                continue
            value, reward = values_BT[b, t], rewards_BT[b, t]
            running = (1 - m + m * gamma * lam) * running + m * (reward + gamma * following - value)
            following = (1 - m) * following + m * value
            advantages_BT[b, t], returns_BT[b, t] = running, running + value
    return advantages_BT, returns_BT


def masked_whiten_stats(values: Tensor, mask: Tensor) -> Tensor:
    """Return a (3,) float64 tensor: count, mean and sum of squared deviations of the valid values."""
    valid = values[mask].double()
    if not valid.numel():
        return torch.zeros(3, dtype=torch.float64, device=values.device)
    mean = valid.mean()
    count = torch.full_like(mean, valid.numel())
    return torch.stack([count, mean, (valid - mean).square().sum()])
