"""Losses, GAE and whitening compared with independent oracles and with the published semantics of verl."""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from megappo.algo.aggregation import Aggregation, token_weights
from megappo_kernels.backend import use_backend
from megappo_kernels.gae import gae
from megappo_kernels.losses import PolicyInputs, ppo_token_loss, ppo_value_loss
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.whiten import masked_whiten, masked_whiten_stats, merge_whiten_stats
from tests.support.kernels import policy_inputs, verl_gae
from tests.support.oracles import algorithm
from tests.support.oracles import kernels as reference
from tests.support.oracles.policy_losses import CASES
from tests.support.quick import cases

OBJECTIVES: list[dict[str, Any]] = [
    {},
    {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0},
    {"entropy_coef": 0.01, "dual_clip": 1.5},
    {"policy_loss": "penalty", "penalty_coef": 0.7},
    *({"policy_loss": name, **of_tokens} for name, (of_tokens, _) in CASES.items()),
    *({"kl": kind, "kl_coef": 0.2} for kind in ("k1", "abs", "k2", "k3", "kl", "mse", "low_var_kl")),
]


def single(inputs: PolicyInputs) -> PolicyInputs:
    """Return the inputs in float32."""
    return PolicyInputs(**{k: v.float() if v.is_floating_point() else v for k, v in inputs.tensors().items()})


def drawn(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logprob = -torch.rand(shape, generator=g, dtype=torch.float64) * 3
    return logprob.requires_grad_(), torch.rand(shape, generator=g, dtype=torch.float64).requires_grad_()


def drawn_inputs(logprob: Tensor, seed: int, **more: bool) -> PolicyInputs:
    """Return inputs with probabilities below 1 and sequences of 1 to 100 tokens."""
    fields = policy_inputs(logprob, seed, imitates=True, **more).tensors()
    fields["old_logprob"] = -fields["old_logprob"].abs()
    starts = torch.randint(
        0, logprob.numel(), (logprob.numel() // 50 + 3,), generator=torch.Generator().manual_seed(seed)
    )
    tokens = torch.arange(logprob.numel())
    return PolicyInputs(**fields, sequences=(tokens[:, None] >= starts).sum(1).view(logprob.shape))


@pytest.mark.parametrize("settings", OBJECTIVES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["near", "far"])
def test_policy_loss_matches_the_algorithm(settings: dict[str, object], wide: bool) -> None:
    """The test compares values, gradients and all metrics in float64. Some ratios exceed the clamps."""
    logprob, entropy = drawn((5, 37), seed=1)
    inputs = drawn_inputs(logprob, seed=2, wide=wide)
    mine = ppo_token_loss(logprob=logprob, entropy=entropy, inputs=inputs, objective=PolicyObjective(**settings))  # type: ignore[arg-type]
    grads = torch.autograd.grad(mine.loss * 3, (logprob, entropy))
    truth = algorithm.policy_loss(logprob=logprob, entropy=entropy, **inputs.tensors(), **settings)  # type: ignore[arg-type]
    true_grads = torch.autograd.grad(truth.loss * 3, (logprob, entropy))
    torch.testing.assert_close(mine.loss, truth.loss, rtol=1e-6, atol=1e-6)
    for got, expected in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert set(mine.metrics) == set(truth.metrics)
    for name, value in truth.metrics.items():
        torch.testing.assert_close(mine.metrics[name].float(), value.float(), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("settings", OBJECTIVES, ids=str)
def test_triton_policy_loss(settings: dict[str, object]) -> None:
    logprob, entropy = drawn((1500,), seed=3)
    inputs = drawn_inputs(logprob, seed=4)
    objective = PolicyObjective(**settings)  # type: ignore[arg-type]
    truth = ppo_token_loss(logprob=logprob, entropy=entropy, inputs=inputs, objective=objective)
    true_grads = torch.autograd.grad(truth.loss, (logprob, entropy))
    leaves = [x.detach().float().requires_grad_() for x in (logprob, entropy)]
    with use_backend("triton"):
        mine = ppo_token_loss(logprob=leaves[0], entropy=leaves[1], inputs=single(inputs), objective=objective)
    grads = torch.autograd.grad(mine.loss, leaves)
    for got, expected in zip((mine.loss, *grads), (truth.loss, *true_grads), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    for name, value in truth.metrics.items():
        torch.testing.assert_close(mine.metrics[name], value, rtol=1e-5, atol=1e-4, msg=name)


@pytest.mark.parametrize("settings", OBJECTIVES[:4], ids=str)
def test_policy_loss_matches_the_reference(settings: dict[str, object]) -> None:
    logprob, entropy = drawn((40,), seed=5)
    inputs = policy_inputs(logprob, seed=6, imitates=True)
    mine = ppo_token_loss(logprob=logprob, entropy=entropy, inputs=inputs, objective=PolicyObjective(**settings))  # type: ignore[arg-type]
    truth = reference.policy_loss(logprob=logprob, entropy=entropy, **inputs.tensors(), **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(mine.loss, truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_aggregations_are_token_weights(mode: Aggregation) -> None:
    logprob, entropy = drawn((4, 9), seed=7)
    inputs = policy_inputs(logprob, seed=8)
    weights = token_weights(mask=inputs.mask, mode=mode).double()
    inputs = PolicyInputs(**(inputs.tensors() | {"weights": weights}))
    mine = ppo_token_loss(logprob=logprob, entropy=entropy, inputs=inputs).loss
    per_token = algorithm.policy_loss(
        logprob=logprob, old_logprob=inputs.old_logprob, advantages=inputs.advantages,
        importance_weights=inputs.importance_weights, weights=torch.ones_like(weights), mask=inputs.mask,
    )  # fmt: skip
    gradient = torch.autograd.grad(mine, logprob)[0]
    plain = torch.autograd.grad(per_token.loss, logprob)[0]
    torch.testing.assert_close(gradient, plain * weights, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(backend: str, clip: float | None) -> None:
    g = torch.Generator().manual_seed(9)
    names = ("values", "old_values", "returns", "weights")
    fields: dict[str, Any] = {name: torch.randn(3, 700, generator=g, dtype=torch.float64) for name in names}
    mask = torch.rand(3, 700, generator=g) < 0.6
    for x in fields.values():
        x[~mask] = float("nan")
    exact = fields["values"].clone().requires_grad_()
    truth = algorithm.value_loss(**(fields | {"values": exact}), mask=mask, value_clip=clip)
    true_grad = torch.autograd.grad(truth.loss, exact)[0]
    dtype, tolerance = (torch.float64, 1e-6) if backend == "torch" else (torch.float32, 2e-5)
    leaf = fields["values"].to(dtype).requires_grad_()
    with use_backend(backend):  # type: ignore[arg-type]
        mine = ppo_value_loss(
            **({k: v.to(dtype) for k, v in fields.items()} | {"values": leaf}), mask=mask, value_clip=clip
        )
    torch.testing.assert_close(mine.loss.double(), truth.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.autograd.grad(mine.loss, leaf)[0].double(), true_grad, rtol=tolerance, atol=1e-6)
    assert set(mine.metrics) == set(truth.metrics)
    for name, value in truth.metrics.items():
        torch.testing.assert_close(mine.metrics[name].float(), value.float(), rtol=1e-5, atol=1e-3, msg=name)
    if clip is None:
        slow = reference.value_loss(**{k: v.flatten() for k, v in fields.items()}, mask=mask.flatten())
        torch.testing.assert_close(mine.loss.double(), slow, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_more_tokens_than_a_block_index(backend: str) -> None:
    n = 70_001
    with use_backend(backend):  # type: ignore[arg-type]
        out = ppo_token_loss(
            logprob=torch.zeros(1, n),
            inputs=PolicyInputs(
                old_logprob=torch.zeros(1, n),
                advantages=torch.ones(1, n),
                weights=torch.full((1, n), 1 / n),
                mask=torch.ones(1, n, dtype=torch.bool),
            ),
        )
    assert float(out.loss) == pytest.approx(-1.0, abs=1e-6) and float(out.metrics["count"]) == n


def test_losses_do_not_wait_for_the_device() -> None:
    """The test uses the meta device of torch, where each read of a value raises an error."""
    logprob, entropy = (torch.empty(4, 50, device="meta", requires_grad=True) for _ in range(2))
    mask = torch.empty(4, 50, dtype=torch.bool, device="meta")
    names = ("old_logprob", "advantages", "weights", "ref_logprob", "importance_weights")
    fields = {name: torch.empty(4, 50, device="meta") for name in names}
    inputs = PolicyInputs(mask=mask, **fields)
    objective = PolicyObjective(dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01)
    loss = ppo_token_loss(logprob=logprob, entropy=entropy, inputs=inputs, objective=objective).loss
    fields = {"old_values": entropy.detach(), "returns": inputs.advantages, "weights": inputs.weights}
    loss = loss + ppo_value_loss(values=logprob, mask=mask, value_clip=0.2, **fields).loss
    loss.backward()
    advantages, _ = gae(inputs.advantages, fields["old_values"], mask, gamma=0.99, lam=0.95)
    masked_whiten(advantages, mask, masked_whiten_stats(advantages, mask))
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        loss.item()


def rollout(rows: int, length: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards, values and masks with holes and ragged ends. Masked entries are garbage, and one row has no
    tokens."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, length, generator=g, dtype=torch.float64).to(dtype)
    ends = torch.randint(0, length + 1, (rows, 1), generator=g)
    mask = (torch.rand(rows, length, generator=g) < 0.7) & (torch.arange(length) < ends)
    mask[0] = False
    rewards[~mask], values[~mask] = float("nan"), float("inf")
    return rewards, values, mask


GAMMAS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)]


@pytest.mark.parametrize(("gamma", "lam"), GAMMAS)
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 2), (7, 37), (5, 64), (2, 1000), (4097, 3)])
def test_gae_matches_the_algorithm_and_verl(rows: int, length: int, gamma: float, lam: float) -> None:
    rewards, values, mask = rollout(rows, length, seed=length)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    truth = algorithm.compute_gae(rewards=rewards, values=values, mask=mask, gamma=gamma, lam=lam)
    torch.testing.assert_close((advantages, returns), truth, rtol=0, atol=1e-6)
    clean_rewards, clean_values = (x.masked_fill(~mask, 0.0) for x in (rewards, values))
    published = verl_gae(clean_rewards, clean_values, mask.double(), gamma, lam)
    torch.testing.assert_close((advantages[mask], returns[mask]), tuple(x[mask] for x in published), rtol=0, atol=1e-6)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


@pytest.mark.parametrize("fractional", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), GAMMAS)
def test_gae_with_bootstrap_matches_the_reference(fractional: bool, gamma: float, lam: float) -> None:
    rewards, values, mask = rollout(4, 29, seed=1)
    weight = mask * torch.rand(4, 29, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    bootstrap = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    used_mask = weight if fractional else mask
    mine = gae(rewards, values, used_mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    truth = reference.gae(rewards, values, used_mask, gamma=gamma, lam=lam, bootstrap_B=bootstrap)
    torch.testing.assert_close(mine, truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("fractional", [False, True])
def test_packed_gae_equals_gae_per_sequence(backend: str, fractional: bool) -> None:
    lengths = [1, 700, 0, 1024, 1025, 3, 37]
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    rewards, values, mask = (x[1] for x in rollout(2, sum(lengths), seed=5))
    used_mask = mask * torch.rand(len(mask), dtype=torch.float64) if fractional else mask
    bootstrap = torch.randn(len(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    dtype, tolerance = (torch.float64, 1e-6) if backend == "torch" else (torch.float32, 2e-5)
    inputs = [rewards.to(dtype), values.to(dtype), used_mask.to(dtype) if fractional else used_mask]
    with use_backend(backend):  # type: ignore[arg-type]
        advantages, returns = gae(*inputs, gamma=0.99, lam=0.95, bootstrap=bootstrap.to(dtype), cu_seqlens=starts)
    for s in range(len(lengths)):
        rows = slice(starts[s], starts[s + 1])
        one = (x[None, rows] for x in (rewards, values, used_mask))
        truth = gae(*one, gamma=0.99, lam=0.95, bootstrap=bootstrap[s : s + 1])
        torch.testing.assert_close((advantages[rows].double(), returns[rows].double()), (truth[0][0], truth[1][0]),
                                   rtol=0, atol=tolerance)  # fmt: skip


LENGTHS = [1, 5, 1024, 2500]


@pytest.mark.parametrize(
    ("gamma", "lam", "length"),
    cases(
        [(*discounts, length) for discounts in GAMMAS for length in LENGTHS],
        quick=[(0.99, 0.95, length) for length in LENGTHS],
        exhaustive=[
            (*discounts, length)
            for discounts in GAMMAS
            if discounts not in ((0.99, 0.95), (1.0, 1.0))
            for length in (1, 1024, 2500)
        ],
    ),
)
def test_triton_gae(gamma: float, lam: float, length: int) -> None:
    rewards, values, mask = rollout(3, length, seed=8)
    bootstrap = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64)
    truth = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    with use_backend("triton"):
        mine = gae(rewards.float(), values.float(), mask, gamma=gamma, lam=lam, bootstrap=bootstrap.float())
    # With gamma = lam = 1, GAE sums thousands of numbers.
    torch.testing.assert_close(tuple(x.double() for x in mine), truth, rtol=1e-5, atol=2e-5 * max(1, length / 100))


def test_gae_rejects_mismatched_shapes() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="differ in shape"):
        gae(x, x, torch.ones(2, 2).bool(), gamma=1, lam=1)
    with pytest.raises(ValueError, match=r"bootstrap has shape \(3,\), must be \(2,\)"):
        gae(x, x, x.bool(), gamma=1, lam=1, bootstrap=torch.zeros(3))
    with pytest.raises(ValueError, match="cu_seqlens"):
        gae(x, x, x.bool(), gamma=1, lam=1, cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("parts", [1, 4])
def test_whitening(backend: str, parts: int) -> None:
    g = torch.Generator().manual_seed(10)
    values, mask = torch.randn(8, 1500, generator=g) * 3 + 50, torch.rand(8, 1500, generator=g) < 0.6
    mask[:2] = False
    values[~mask] = float("nan")
    with use_backend(backend):  # type: ignore[arg-type]
        pieces = [masked_whiten_stats(v, m) for v, m in zip(values.chunk(parts), mask.chunk(parts), strict=True)]
    stats = merge_whiten_stats(torch.stack(pieces))
    torch.testing.assert_close(stats, reference.masked_whiten_stats(values, mask), rtol=1e-6, atol=0)
    white = masked_whiten(values, mask, stats)
    torch.testing.assert_close(white, algorithm.masked_whiten(values=values, mask=mask), rtol=1e-5, atol=1e-5)
    assert (white[~mask] == 0).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_whitening_without_tokens(backend: str) -> None:
    with use_backend(backend):  # type: ignore[arg-type]
        stats = masked_whiten_stats(torch.full((3, 4), float("nan")), torch.zeros(3, 4, dtype=torch.bool))
    assert stats.tolist() == [0, 0, 0]


def test_bad_objectives_are_rejected() -> None:
    with pytest.raises(ValueError, match="did you mean 'k3'"):
        PolicyObjective(kl="k33")
    with pytest.raises(ValueError, match=r"dual_clip is 0\.5"):
        PolicyObjective(dual_clip=0.5)
    with pytest.raises(ValueError, match="policy_loss is 'clop', must be one of clip, penalty, dis, "):
        PolicyObjective(policy_loss="clop")
    with pytest.raises(ValueError, match="not a backend"), use_backend("cuda"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_gae_with_one_lambda_per_sequence(backend: Any) -> None:
    """Each row uses its own lambda. The inputs are padded and packed, and masks are boolean and fractional."""
    g = torch.Generator().manual_seed(12)
    rewards, values = (torch.randn(4, 50, generator=g) for _ in range(2))
    lam = torch.tensor([0.0, 0.5, 0.95, 1.0], dtype=torch.float64)
    for mask in (torch.rand(4, 50, generator=g) < 0.7, torch.rand(4, 50, generator=g)):
        truth = [gae(*(x[b : b + 1] for x in (rewards, values, mask)), gamma=0.9, lam=float(lam[b])) for b in range(4)]
        flat, starts = [x.flatten() for x in (rewards, values, mask)], torch.arange(5) * 50
        with use_backend(backend):
            padded = gae(rewards, values, mask, gamma=0.9, lam=lam)
            packed = gae(*flat, gamma=0.9, lam=lam, cu_seqlens=starts)
        for i, expected in enumerate(zip(*truth, strict=True)):
            for mine in (padded[i], packed[i].view(4, 50)):
                torch.testing.assert_close(mine, torch.cat(expected), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"lam has shape \(3,\), must be a number or \(4,\)"):
        gae(rewards, values, rewards > 0, gamma=1, lam=lam[:3])


def by_borders(
    rewards: Tensor, values: Tensor, mask: Tensor, borders: Tensor, gamma: float, lam: float, bootstrap: Tensor
) -> Tensor:
    """Compute GAE token by token with the decay of each token."""
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        following, running = float(bootstrap[row]), 0.0
        for t in reversed(range(values.shape[1])):
            m = float(mask[row, t])
            if not m:
                continue
            reach, trace = (gamma, gamma * lam) if borders[row, t] else (1.0, 1.0)
            r, v = float(rewards[row, t]), float(values[row, t])
            running = (1 - m + m * trace) * running + m * reach * following + m * (r - v)
            following = (1 - m) * following + m * v
            advantages[row, t] = running
    return advantages


@pytest.mark.parametrize("fractional", [False, True], ids=["whole", "fractional"])
def test_gae_decays_only_at_borders(fractional: bool) -> None:
    """The inputs are padded and packed, with torch and Triton, and masked entries are garbage."""
    g = torch.Generator().manual_seed(21)
    rewards, values = (torch.randn(3, 70, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(3, 70, generator=g) < 0.7
    borders = (torch.rand(3, 70, generator=g) < 0.2) & mask
    bootstrap = torch.randn(3, generator=g, dtype=torch.float64)
    used_mask = mask * torch.rand(3, 70, generator=g, dtype=torch.float64) if fractional else mask
    rewards[~mask], values[~mask] = math.nan, -1e30
    expected = by_borders(rewards, values, used_mask, borders, 0.9, 0.8, bootstrap)
    assert not torch.allclose(gae(rewards, values, used_mask, gamma=0.9, lam=0.8, bootstrap=bootstrap)[0], expected)
    starts = torch.arange(4) * 70
    for backend, kind, tolerance in (("torch", torch.float64, 1e-9), ("triton", torch.float32, 1e-5)):
        x = [y.to(kind) if y.is_floating_point() else y for y in (rewards, values, used_mask, bootstrap)]
        flat = [y.flatten() for y in x[:3]]
        options: dict[str, Any] = {"gamma": 0.9, "lam": 0.8, "bootstrap": x[3]}
        with use_backend(backend):  # type: ignore[arg-type]
            padded, _ = gae(*x[:3], **options, borders=borders)
            packed, _ = gae(*flat, **options, borders=borders.flatten(), cu_seqlens=starts)
        for mine in (padded, packed.view(3, 70)):
            torch.testing.assert_close(mine.double(), expected, rtol=tolerance, atol=tolerance)
    with pytest.raises(ValueError, match=r"borders is torch.float64 \(3, 70\), must be bool \(3, 70\)"):
        gae(rewards, values, used_mask, gamma=1, lam=1, borders=rewards)


def test_policy_loss_and_slopes_by_hand() -> None:
    """Tokens are inside the clip, above the clip, at the dual clip, beyond the clamp of the log-ratio, or masked."""
    logprob = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0], dtype=torch.float64, requires_grad=True)
    inputs = PolicyInputs(
        old_logprob=torch.tensor([-1.0, -1.5, -3.0, -26.0, 0.0], dtype=torch.float64),
        advantages=torch.tensor([2.0, 1.0, -1.0, 1.0, 5.0], dtype=torch.float64),
        weights=torch.tensor([0.5, 1.0, 2.0, 0.25, 1.0], dtype=torch.float64),
        mask=torch.tensor([True, True, True, True, False]),
        ref_logprob=torch.tensor([-1.5, -1.0, 2.0, 30.0, 0.0], dtype=torch.float64),
        nll_weights=torch.tensor([0.0, 0.125, 0.0, 0.5, 9.0], dtype=torch.float64),
    )
    objective = PolicyObjective(clip_high=0.28, dual_clip=3.0, entropy_coef=0.1, kl_coef=0.2)
    out = ppo_token_loss(logprob=logprob, entropy=entropy, inputs=inputs, objective=objective)
    grads = torch.autograd.grad(2 * out.loss, (logprob, entropy))
    e = torch.tensor([0.5, 2.0, 20.0], dtype=torch.float64).exp().tolist()
    k3 = [e[0] ** -1 - 1 + 0.5, 0.0, 10.0, 10.0]  # e^3 - 4 and e^31 - 32 are clamped
    expected = {
        "pg_loss": 0.5 * -2 + 1 * -1.28 + 2 * 3 + 0.25 * -1.28,
        "entropy_loss": -0.1 * (0.5 + 2 + 6 + 1),
        "kl_loss": 0.2 * (0.5 * k3[0] + 2 * 10 + 0.25 * 10),
        "nll_loss": 0.125 + 0.5,
        "clipfrac": 2,
        "clipfrac_lower": 1,
        "ppo_kl": -(0 + 0.5 + 2 + 20),
        "ppo_kl_k3": (e[0] - 1.5) + (e[1] - 3) + (e[2] - 21),
        "ratio": 1 + sum(e),
        "ratio_max": e[2],
        "entropy": 10,
        "masked_below": 0,
        "masked_above": 2,
        "band_position": 0.2 / 0.48 + 3,
        "token_weight.mean": 0.25,  # only the first token has a weight, 1
        "token_weight.m2": 0.75,
        "ref_kl": sum(k3),
        "count": 4,
    }
    expected["loss"] = sum(expected[name] for name in ("pg_loss", "entropy_loss", "kl_loss", "nll_loss"))
    assert {n: x.item() for n, x in out.metrics.items()} == {
        n: pytest.approx(x, abs=1e-12) for n, x in expected.items()
    }
    assert out.loss.item() == out.metrics["loss"].item()
    slope = 2 * 0.5 * (-2 + 0.2 * (1 - e[0] ** -1))
    assert grads[0].tolist() == [pytest.approx(slope), -0.25, 0, -1.0, 0]
    assert grads[1].tolist() == [pytest.approx(-0.2 * w) for w in (0.5, 1, 2, 0.25, 0)]


def test_value_loss_and_slopes_by_hand() -> None:
    """Values are below the clip, at the clip, beyond the clip with a larger and a smaller clipped loss, or masked."""
    values = torch.tensor([1.25, 1.5, 2.0, 2.0, 9.0], dtype=torch.float64, requires_grad=True)
    out = ppo_value_loss(
        values=values,
        old_values=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64),
        returns=torch.tensor([2.0, 3.0, 3.0, 0.0, 7.0], dtype=torch.float64),
        weights=torch.tensor([1.0, 2.0, 4.0, 8.0, 1.0], dtype=torch.float64),
        mask=torch.tensor([True, True, True, True, False]),
        value_clip=0.5,
    )
    # The third value is clipped to 1.5, and the square 2.25 exceeds 1. The fourth is also clipped, but 2.25 is below 4.
    assert out.loss.item() == 0.5 * (0.5625 + 2 * 2.25 + 4 * 2.25 + 8 * 4)
    assert torch.autograd.grad(out.loss, values)[0].tolist() == [-0.75, -3.0, 0.0, 16.0, 0.0]
    assert {n: x.item() for n, x in out.metrics.items()} == {"clipfrac": 1, "count": 4, "loss": out.loss.item()}
