"""Policy losses as published, differentiated by autograd. Divergences are computed from distributions.

Arguments are float64 tensors of the same shape. `mask` selects the valid tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Bernoulli, kl_divergence

CASES: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "dis": ({"band_low": 0.8, "band_high": 3.0}, {"band_low": 0.2, "band_high": 0.3}),
    "cispo": ({"band_low": 1.0, "band_high": 0.5}, {"band_low": 0.3, "band_high": 0.2}),
    "gspo": ({"band_low": 0.1, "band_high": 0.2}, {"band_low": 0.1, "band_high": 0.1}),
    "sapo": ({"gate_positive": 2.0, "gate_negative": 3.0}, {}),
    "dppo_tv": (
        {"band_low": 0.1, "band_high": 0.15, "band_cap": 3.0},
        {"band_low": 0.001, "band_high": 0.002, "band_cap": 1.5},
    ),
    "dppo_kl": ({"band_low": 0.05, "band_high": 0.1, "kl_coef": 0.3}, {"band_low": 5e-5, "band_high": 1e-4}),
}
"""Arguments of `PolicyObjective` for tests of random tokens, and for tests of the output layer, where ratios differ
less from 1. Some tokens are outside of the band. `clip` and `penalty` are in `algorithm`."""


def surrogate(
    name: str, logprob: Tensor, old: Tensor, A: Tensor, mask: Tensor, sequences: Tensor | None, **s: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return for each token the loss, masks for tokens below the band, above the band and at the dual-clip bound
    (always False), and the position in the band."""
    if name in ("dis", "gspo", "sapo"):  # beyond the limit, the gradient of a token is zero
        is_near = (logprob - old).abs() <= 20
        logprob = torch.where(is_near, logprob, logprob.detach())
    ratio = (logprob - old).clamp(-20, 20).exp()
    fixed, never = ratio.detach(), torch.zeros_like(mask)
    low, high = s.get("band_low", 0.2), s.get("band_high", 0.2)
    place = torch.minimum(torch.maximum((fixed - 1 + low) / (low + high), torch.zeros(())), torch.ones(()))
    if name == "dis":
        outside = ~((fixed >= 1 - low) & (fixed <= 1 + high))
        return -A * fixed.masked_fill(outside, 0) * logprob, outside & (fixed < 1), outside & (fixed > 1), never, place
    if name == "cispo":
        weight = torch.minimum(torch.maximum(fixed, torch.tensor(1 - low)), torch.tensor(1 + high))
        return -A * weight * logprob, weight > fixed, weight < fixed, never, place
    if name == "sapo":
        rising, falling = s.get("gate_positive", 1.0), s.get("gate_negative", 1.05)
        gates = [torch.sigmoid(tau * (ratio - 1)) for tau in (rising, falling)]
        value = torch.where(A > 0, gates[0] * 4 / rising, gates[1] * 4 / falling)
        return -A * value, never, never, never, torch.where(A > 0, gates[0], gates[1]).detach()
    if name == "gspo":
        assert sequences is not None
        return _gspo(logprob, old, A, mask, sequences, low, high)
    new_token, old_token = Bernoulli(logits=_logit(logprob.detach())), Bernoulli(logits=_logit(old))
    rises = new_token.probs > old_token.probs
    if name == "dppo_tv":
        two = torch.stack([new_token.probs - old_token.probs, old_token.probs - new_token.probs])
        distance = two.abs().sum(0) / 2
    else:
        distance = kl_divergence(old_token, new_token)
    below, above = (A < 0) & ~rises & (distance > low), (A > 0) & rises & (distance > high)
    cap = s.get("band_cap", 20.0)
    weight = fixed.clamp(max=cap).masked_fill(below | above, 0)
    signed = torch.where(rises, distance.clamp(max=high), -distance.clamp(max=low))
    return -A * weight * logprob, below, above, never, (signed + low) / (low + high)


def _logit(logprob: Tensor) -> Tensor:
    """Return the logit of a probability."""
    return logprob - torch.log(-torch.expm1(logprob))


def _gspo(
    logprob: Tensor, old: Tensor, A: Tensor, mask: Tensor, sequences: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute GSPO-token: the ratio of the sequence without gradient, times a ratio of 1 with gradient."""
    whole = torch.ones_like(logprob)
    for number in sequences[mask].unique():
        own = mask & (sequences == number)
        whole[own] = (logprob - old)[own].clamp(-20, 20).mean().exp().detach()
    ratio = whole * (logprob - logprob.detach()).exp()
    plain, limited = -A * ratio, -A * ratio.clamp(1 - low, 1 + high)
    clipped = limited > plain
    place = (whole.clamp(1 - low, 1 + high) - 1 + low) / (low + high)
    return torch.maximum(plain, limited), clipped & (whole < 1), clipped & (whole > 1), torch.zeros_like(mask), place
