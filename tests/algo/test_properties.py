"""The algorithm matches independent float64 references and has the required properties for any input."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megappo.algo.aggregation import Aggregation
from megappo.algo.estimators import builtin
from megappo_kernels.gae import gae
from megappo_kernels.losses import ppo_value_loss
from megappo_kernels.objectives import KL_ESTIMATES, kl_estimate
from megappo_kernels.whiten import masked_whiten, masked_whiten_stats, merge_whiten_stats
from tests.support.kernels import token_loss
from tests.support.oracles.algorithm import aggregate

SEEDS = st.integers(0, 2**31)


def ragged(seed: int, holes: bool = True) -> tuple[torch.Generator, Tensor]:
    """Return a generator and a random mask (B, T). Rows can have holes or be empty."""
    g = torch.Generator().manual_seed(seed)
    B, T = int(torch.randint(1, 6, (), generator=g)), int(torch.randint(1, 20, (), generator=g))
    lengths = torch.randint(0, T + 1, (B, 1), generator=g)
    mask = torch.arange(T)[None] < lengths
    return g, mask & (torch.rand(B, T, generator=g) < 0.8) if holes else mask


def gae_by_definition(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> list[float]:
    """Compute Eq. 16 of Schulman et al. 2016 as a double sum over the valid tokens of one sample."""
    n = len(rewards)
    following = [*values[1:].tolist(), 0.0]
    deltas = [float(rewards[t]) + gamma * following[t] - float(values[t]) for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_its_definition(seed: int, gamma: float, lam: float) -> None:
    g, mask = ragged(seed)
    rewards, values = (torch.randn(mask.shape, generator=g, dtype=torch.float64) for _ in range(2))
    expected = torch.zeros_like(values)
    for b in range(len(mask)):
        m = mask[b]
        expected[b, m] = torch.tensor(gae_by_definition(rewards[b, m], values[b, m], gamma, lam), dtype=torch.float64)
    garbage = torch.where(torch.rand(mask.shape, generator=g) < 0.5, math.nan, math.inf)
    advantages, returns = gae(
        rewards=torch.where(mask, rewards, garbage), values=torch.where(mask, values, garbage), mask=mask, gamma=gamma,
        lam=lam,
    )  # fmt: skip
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(returns, (expected + values) * mask, rtol=1e-6, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_whitening_in_parts_equals_whitening_the_batch(seed: int) -> None:
    g, mask = ragged(seed)
    values = torch.randn(mask.shape, generator=g) * 3 + 100
    values[~mask] = math.nan
    rows = [slice(0, 1), slice(1, None)] if len(mask) > 1 else [slice(None)]
    merged = merge_whiten_stats(torch.stack([masked_whiten_stats(values[r], mask[r]) for r in rows]))
    white = masked_whiten(values, mask, merged)
    once = masked_whiten(values, mask, masked_whiten_stats(values, mask))
    torch.testing.assert_close(white, once, rtol=1e-4, atol=1e-4)
    assert (white[~mask] == 0).all()
    if mask.sum() > 1:
        assert abs(white[mask].mean()) < 1e-3
        assert abs(white[mask].var(unbiased=False) - 1) < 1e-2


@pytest.mark.parametrize("mode", get_args(Aggregation))
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_microbatch_splits_have_the_same_loss(mode: Aggregation, seed: int) -> None:
    g, mask = ragged(seed)
    loss = torch.randn(mask.shape, generator=g)
    totals = {"total_tokens": int(mask.sum()), "total_sequences": int(mask.any(-1).sum()), "norm_tokens": mask.shape[1]}
    whole = aggregate(loss=loss, mask=mask, mode=mode)
    parts = [aggregate(loss=loss[b : b + 1], mask=mask[b : b + 1], mode=mode, **totals) for b in range(len(mask))]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def objective_by_hand(lp: Tensor, old: Tensor, adv: Tensor, ref: Tensor, ent: Tensor, w: Tensor, iw: Tensor) -> Tensor:
    """Compute the loss per token with clip .1/.3, dual clip 2, entropy .01 and k3 to the reference .2."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(lp)):
        ratio = torch.exp(lp[i] - old[i])
        term = -torch.minimum(ratio * adv[i], torch.clamp(ratio, 0.9, 1.3) * adv[i])
        if adv[i] < 0:
            term = torch.minimum(term, -2.0 * adv[i])
        k3 = (torch.exp(ref[i] - lp[i]) - (ref[i] - lp[i]) - 1).clamp(max=10.0)
        total = total + w[i] * (iw[i] * term - 0.01 * ent[i] + 0.2 * k3)
    return total


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_policy_loss_and_gradient_by_hand(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    # With half the standard deviation, k3 rarely reaches the clamp of 10.
    lp, old, adv, ref, ent, w, iw = (0.5 * torch.randn(12, generator=g, dtype=torch.float64) for _ in range(7))
    mask = torch.rand(12, generator=g) < 0.7
    leaves = [x.clone().requires_grad_() for x in (lp, ent)]
    expected = objective_by_hand(leaves[0][mask], old[mask], adv[mask], ref[mask], leaves[1][mask], w[mask], iw[mask])
    if mask.any():
        expected.backward()
    ours = [torch.where(mask, x, math.nan).requires_grad_() for x in (lp, ent)]
    others = [torch.where(mask, x, math.inf) for x in (old, adv, ref, w, iw)]
    result = token_loss(
        logprob=ours[0], entropy=ours[1], old_logprob=others[0], advantages=others[1], ref_logprob=others[2],
        weights=others[3], importance_weights=others[4], mask=mask, clip_low=0.1, clip_high=0.3, dual_clip=2.0,
        entropy_coef=0.01, kl_coef=0.2,
    )  # fmt: skip
    torch.testing.assert_close(result.loss, expected, rtol=1e-9, atol=1e-12)
    result.loss.backward()
    for mine, theirs in zip(ours, leaves, strict=True):
        reference = theirs.grad if theirs.grad is not None else torch.zeros(12, dtype=torch.float64)
        torch.testing.assert_close(mine.grad, reference, rtol=1e-9, atol=1e-12)
    assert all(torch.isfinite(v) for v in result.metrics.values())


def test_penalty_objective() -> None:
    lp = torch.tensor([-1.0, -3.0], requires_grad=True)
    old, adv = torch.tensor([-1.2, -2.0]), torch.tensor([1.0, -2.0])
    result = token_loss(
        logprob=lp, old_logprob=old, advantages=adv, weights=torch.tensor([0.5, 0.5]), mask=torch.tensor([True, True]),
        policy_loss="penalty", penalty_coef=3.0,
    )  # fmt: skip
    d = lp.detach() - old
    expected = 0.5 * (-d.exp() * adv + 3.0 * (d.exp() - 1 - d)).sum()
    torch.testing.assert_close(result.loss, expected)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.booleans())
def test_value_loss_by_hand(seed: int, clipped: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    v, old, ret, w = (torch.randn(9, generator=g, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(9, generator=g) < 0.7
    near = old + (v - old).clamp(-0.2, 0.2)
    worst = torch.maximum((v - ret) ** 2, (near - ret) ** 2) if clipped else (v - ret) ** 2
    expected = 0.5 * (w * worst)[mask].sum()
    dirty = [torch.where(mask, x, math.nan) for x in (v, old, ret, w)]
    leaf = dirty[0].requires_grad_()
    result = ppo_value_loss(
        values=leaf, old_values=dirty[1], returns=dirty[2], weights=dirty[3], mask=mask,
        value_clip=0.2 if clipped else None,
    )  # fmt: skip
    torch.testing.assert_close(result.loss, expected)
    result.loss.backward()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
    assert (leaf.grad[~mask] == 0).all()
    assert result.metrics["count"] == mask.sum()


@pytest.mark.parametrize("kind", KL_ESTIMATES)
def test_kl_penalty_is_finite_for_extreme_tokens(kind: str) -> None:
    lp = torch.tensor([-1e4, 0.0, 3.0], requires_grad=True)
    kl = kl_estimate(lp - torch.tensor([0.0, -1e4, 3.0]), kind)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert lp.grad is not None
    assert torch.isfinite(lp.grad).all()
    assert kl[2] == 0


def by_groups(estimator: str, scores: Tensor, group_ids: Tensor) -> Tensor:
    """Return the advantages (B,) of samples of two tokens. The second token has the score."""
    rewards = torch.stack([torch.zeros_like(scores), scores], dim=1)
    mask = torch.ones(rewards.shape, dtype=torch.bool)
    advantages, returns = builtin(estimator)(
        rewards=rewards, values=None, mask=mask, group_ids=group_ids, gamma=1.0, lam=1.0
    )
    assert torch.equal(advantages, returns) and torch.equal(advantages[:, 0], advantages[:, 1])
    return advantages[:, 0]


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [3.3, 0.1, -0.7, 1e6 + 0.1, 0.0])
def test_equal_scores_have_advantages_of_exactly_zero(estimator: str, dtype: torch.dtype, score: float) -> None:
    for samples in (2, 3, 5, 7, 16, 64, 1000):
        group_ids = torch.arange(samples).repeat_interleave(2) % 2  # the second group has different scores
        scores = torch.where(group_ids == 0, score, torch.linspace(0, 1, 2 * samples)).to(dtype)
        result = by_groups(estimator, scores, group_ids)
        assert (result[group_ids == 0] == 0).all()
        assert (result[group_ids == 1] != 0).all()


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from([0.0, 1000.0]))
def test_grpo_and_rloo_by_their_formulas(seed: int, offset: float) -> None:
    """Groups have one to five samples in any order. Scores can be far from zero."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (4,), generator=g).tolist()
    group_ids = torch.tensor([10 * i for i, n in enumerate(sizes) for _ in range(n)])
    group_ids = group_ids[torch.randperm(len(group_ids), generator=g)]
    scores = offset + torch.randn(len(group_ids), generator=g, dtype=torch.float64)
    grpo, rloo = (by_groups(name, scores, group_ids) for name in ("grpo", "rloo"))
    for b, group in enumerate(group_ids.tolist()):
        own = scores[group_ids == group]
        if len(own) == 1:
            assert grpo[b] == rloo[b] == scores[b]
            continue
        assert grpo[b].item() == pytest.approx(((scores[b] - own.mean()) / (own.std() + 1e-6)).item(), abs=1e-8)
        others = (own.sum() - scores[b]) / (len(own) - 1)
        assert rloo[b].item() == pytest.approx((scores[b] - others).item(), abs=1e-8)
