"""Triton: policy and value loss with gradients and metric sums, one launch each and a deterministic second sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from megappo_kernels.losses import (
    K3_LIMIT,
    KL_KINDS,
    LOG_RATIO_LIMIT,
    POLICY_METRICS,
    VALUE_METRICS,
    PolicyTerms,
)
from megappo_kernels.whiten import merge_whiten_stats

if TYPE_CHECKING:
    from megappo_kernels.losses import PolicyInputs, PolicyObjective

BLOCK, WARPS = 1024, 8


@triton.jit
def kl_terms(gap, limit, k3_limit, KIND: tl.constexpr):
    """(estimate, slope) by the numbers of `losses.KL_KINDS`."""
    if KIND == 1:
        value, slope = gap, tl.full(gap.shape, 1.0, tl.float32)
    elif KIND == 2:
        value, slope = tl.abs(gap), tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
    elif KIND == 3:
        value, slope = 0.5 * gap * gap, gap
    else:
        bounded = tl.where(gap > limit, limit, tl.where(gap < -limit, -limit, gap))
        shrunk = tl.exp(-bounded)
        raw = shrunk - 1 + bounded
        outside = (tl.abs(gap) > limit) | (raw > k3_limit)
        value, slope = tl.where(raw > k3_limit, k3_limit, raw), tl.where(outside, 0.0, 1 - shrunk)
    return value, slope


@triton.jit
def objective_terms(
    log_ratio,
    advantage,
    clip_low,
    clip_high,
    dual_clip,
    penalty_coef,
    PENALTY: tl.constexpr,
    DUAL: tl.constexpr,
):
    """(loss, slope, clip active, dual clip active) per token. Comparisons let NaN through to the loss."""
    ratio = tl.exp(log_ratio)
    loss = -advantage * ratio
    slope = loss
    clipped = tl.zeros(ratio.shape, tl.float32)
    bounded = tl.zeros(ratio.shape, tl.float32)
    if PENALTY:
        loss += penalty_coef * (ratio - 1 - log_ratio)
        slope += penalty_coef * (ratio - 1)
    else:
        high, low = 1 + clip_high, 1 - clip_low
        limited = -advantage * tl.where(ratio > high, high, tl.where(ratio < low, low, ratio))
        is_clipped = limited > loss
        clipped = is_clipped.to(tl.float32)
        loss, slope = tl.where(is_clipped, limited, loss), tl.where(is_clipped, 0.0, slope)
        if DUAL:
            bound = -advantage * dual_clip
            is_bounded = (advantage < 0) & (bound < loss)
            bounded = is_bounded.to(tl.float32)
            loss, slope = tl.where(is_bounded, bound, loss), tl.where(is_bounded, 0.0, slope)
    return loss, slope, clipped, bounded


@triton.jit
def store_ratio_sums(base, log_ratio, ratio):
    """What tells how far the policy went; `log_ratio` and `ratio` are 0 where masked."""
    tl.store(base + 5, tl.sum(-log_ratio, 0))
    tl.store(base + 6, tl.sum(tl.where(ratio == 0, 0.0, ratio - 1 - log_ratio), 0))
    tl.store(base + 7, tl.sum(ratio, 0))
    tl.store(base + 11, tl.max(ratio, 0))


@triton.jit
def load_valid(pointer, offsets, valid):
    """float32, 0 where masked, whatever lies there."""
    return tl.load(pointer + offsets, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def policy_kernel(
    logprob,
    entropy,
    old_logprob,
    advantages,
    weights,
    mask,
    ref_logprob,
    importance,
    grad_logprob,
    grad_entropy,
    partials,
    n,
    clip_low,
    clip_high,
    dual_clip,
    penalty_coef,
    entropy_coef,
    kl_coef,
    limit,
    k3_limit,
    PENALTY: tl.constexpr,
    DUAL: tl.constexpr,
    REFERENCE: tl.constexpr,
    IMPORTANCE: tl.constexpr,
    KL_KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """partials[program, 12] in the order of `losses.POLICY_METRICS`."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    valid = tl.load(mask + offsets, mask=inside, other=0) != 0
    count = valid.to(tl.float32)
    lp, ent = load_valid(logprob, offsets, valid), load_valid(entropy, offsets, valid)
    weight = load_valid(weights, offsets, valid)
    gap = lp - load_valid(old_logprob, offsets, valid)
    log_ratio = tl.where(gap > limit, limit, tl.where(gap < -limit, -limit, gap))
    ratio = tl.exp(log_ratio)
    loss, slope, clipped, bounded = objective_terms(
        log_ratio,
        load_valid(advantages, offsets, valid),
        clip_low,
        clip_high,
        dual_clip,
        penalty_coef,
        PENALTY,
        DUAL,
    )
    slope = tl.where(tl.abs(gap) > limit, 0.0, slope)
    if IMPORTANCE:
        factor = load_valid(importance, offsets, valid)
        loss, slope = loss * factor, slope * factor
    ref_kl = tl.zeros((BLOCK,), tl.float32)
    if REFERENCE:
        ref_kl, ref_slope = kl_terms(lp - load_valid(ref_logprob, offsets, valid), limit, k3_limit, KL_KIND)
        slope += kl_coef * ref_slope
    tl.store(grad_logprob + offsets, weight * slope, mask=inside)
    tl.store(grad_entropy + offsets, -entropy_coef * weight, mask=inside)
    base = partials + tl.program_id(0) * 12
    tl.store(base, tl.sum(weight * loss, 0))
    tl.store(base + 1, tl.sum(-entropy_coef * weight * ent, 0))
    tl.store(base + 2, tl.sum(kl_coef * weight * ref_kl, 0))
    tl.store(base + 3, tl.sum(clipped * count, 0))
    tl.store(base + 4, tl.sum(bounded * count, 0))
    store_ratio_sums(base, log_ratio, ratio * count)
    tl.store(base + 8, tl.sum(ent, 0))
    tl.store(base + 9, tl.sum(ref_kl, 0))
    tl.store(base + 10, tl.sum(count, 0))


@triton.jit
def store_spread(base, x, valid, count):
    """Mean and sum of squared deviations of the valid x; 0 without any."""
    mean = tl.sum(x, 0) / tl.maximum(count, 1.0)
    deviation = tl.where(valid, x - mean, 0.0)
    tl.store(base, mean)
    tl.store(base + 1, tl.sum(deviation * deviation, 0))


@triton.jit
def value_kernel(
    values,
    old_values,
    returns,
    weights,
    mask,
    grad,
    partials,
    n,
    clip,
    CLIPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """partials[program, 8]: the loss, then `losses.VALUE_METRICS`, statistics those of the program's tokens."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    valid = tl.load(mask + offsets, mask=inside, other=0) != 0
    value, target = load_valid(values, offsets, valid), load_valid(returns, offsets, valid)
    weight = load_valid(weights, offsets, valid)
    error = value - target
    square = error * error
    worst, slope = square, error
    clipped = tl.zeros((BLOCK,), tl.float32)
    if CLIPPED:
        old = load_valid(old_values, offsets, valid)
        step = value - old
        bounded = tl.where(step > clip, clip, tl.where(step < -clip, -clip, step))
        limited = (old + bounded - target) * (old + bounded - target)
        # Within the clip the two squares differ by rounding only.
        is_clipped = (tl.abs(step) > clip) & (limited > square)
        clipped = is_clipped.to(tl.float32)
        worst, slope = tl.where(is_clipped, limited, square), tl.where(is_clipped, 0.0, error)
    tl.store(grad + offsets, weight * slope, mask=inside)
    partials += tl.program_id(0) * 8
    tl.store(partials, tl.sum(0.5 * weight * worst, 0))
    tl.store(partials + 1, tl.sum(clipped, 0))
    tl.store(partials + 2, tl.sum(value, 0))
    count = tl.sum(valid.to(tl.float32), 0)
    tl.store(partials + 3, count)
    store_spread(partials + 4, target, valid, count)
    store_spread(partials + 6, error, valid, count)


def launch_policy(logprob: Tensor, entropy: Tensor, inputs: PolicyInputs, objective: PolicyObjective) -> PolicyTerms:
    """`losses.policy_terms`."""
    n, given = logprob.numel(), inputs.tensors()
    flat = {name: x.contiguous() for name, x in given.items()}
    logprob, entropy = logprob.contiguous(), entropy.contiguous()
    grad_logprob, grad_entropy = torch.empty_like(logprob), torch.empty_like(logprob)
    programs = max(1, triton.cdiv(n, BLOCK))
    partials = torch.zeros(programs, len(POLICY_METRICS), dtype=torch.float32, device=logprob.device)
    policy_kernel[(programs,)](
        logprob,
        entropy,
        flat["old_logprob"],
        flat["advantages"],
        flat["weights"],
        flat["mask"].view(torch.uint8),
        flat.get("ref_logprob", logprob),
        flat.get("importance_weights", logprob),
        grad_logprob,
        grad_entropy,
        partials,
        n,
        objective.clip_low,
        objective.clip_high,
        objective.dual_clip or 0.0,
        objective.penalty_coef,
        objective.entropy_coef,
        objective.kl_coef,
        LOG_RATIO_LIMIT,
        K3_LIMIT,
        PENALTY=objective.kind == "penalty",
        DUAL=objective.dual_clip is not None,
        REFERENCE="ref_logprob" in flat,
        IMPORTANCE="importance_weights" in flat,
        KL_KIND=KL_KINDS[objective.kl_kind],
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    sums = partials.sum(0, dtype=torch.float64)
    sums[-1] = partials[:, -1].amax()
    return PolicyTerms(grad_logprob, grad_entropy, sums)


def launch_value(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """`losses._value_terms`: (gradient, sums)."""
    values = values.contiguous()
    grad = torch.empty_like(values)
    programs = max(1, triton.cdiv(values.numel(), BLOCK))
    partials = torch.zeros(programs, 1 + len(VALUE_METRICS), dtype=torch.float32, device=values.device)
    value_kernel[(programs,)](
        values,
        old_values.contiguous(),
        returns.contiguous(),
        weights.contiguous(),
        mask.contiguous().view(torch.uint8),
        grad,
        partials,
        values.numel(),
        clip if clip is not None else 0.0,
        CLIPPED=clip is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    parts = partials.double()
    spreads = [merge_whiten_stats(parts[:, [3, mean, mean + 1]])[1:] for mean in (4, 6)]
    return grad, torch.cat([parts[:, :4].sum(0), *spreads])
