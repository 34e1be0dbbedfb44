"""All metrics of the objectives match their descriptions. The expected values are computed per token in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megappo_kernels.backend import Backend, use_backend
from megappo_kernels.losses import Loss, PolicyInputs, ppo_token_loss, ppo_value_loss
from megappo_kernels.metrics import shown
from megappo_kernels.objectives import POLICY_METRICS, VALUE_METRICS, PolicyObjective


class Token(NamedTuple):
    """Numbers of a token."""

    gap: float
    """Difference between new and old log-probability in nats."""
    advantage: float
    importance: float = 1.0
    weight: float = 0.125
    new: float = -1.5
    entropy: float = 0.5
    ref: float = -1.0
    nll: float = 0.0
    sequence: int = 0


UPDATES = [
    [Token(0.0, 1.0), Token(0.5, 1.0, importance=1.5, entropy=0.25),
     Token(0.5, -1.0, importance=0.5, weight=0.25, ref=-2.0), Token(-0.5, 1.0, new=-0.75, nll=0.3, sequence=1),
     Token(-0.5, -2.0, importance=2.0, sequence=1)],
    [
        Token(2.0, -1.0, entropy=1.0, sequence=2), Token(1.5, 0.0, importance=0.25, weight=0.5, sequence=2),
        Token(-1.5, 0.0, new=-0.25, ref=-3.0, sequence=2), Token(25.0, -1.0, importance=1.25, new=-0.125, sequence=2),
        Token(-25.0, 1.0, new=-27.0, sequence=3), Token(25.0, 1.0, new=-0.5, sequence=3),
        Token(-25.0, -1.0, new=-26.0, ref=-27.0, sequence=3),
        Token(3.5, -0.5, new=-0.0625, importance=0.75, sequence=3),
    ],
]  # fmt: skip
"""Two minibatches of a step. Ratios are inside and outside of each band, and some differences exceed 20 nats."""


class Expected(NamedTuple):
    """Expected values of a loss for a token."""

    loss: float
    slope: float
    below: bool
    above: bool
    bounded: bool
    position: float
    weight: float


def near(gap: float) -> float:
    return min(max(gap, -20.0), 20.0)


def within(x: float, low: float, high: float) -> float:
    return (min(max(x, low), high) - low) / (high - low)


def _clipped(ratio: float, A: float, low: float, high: float) -> Expected:
    below, above = A < 0 and ratio < low, A > 0 and ratio > high
    loss = -A * min(max(ratio, low), high) if below or above else -A * ratio
    weight = 0.0 if below or above else ratio
    return Expected(loss, -A * weight, below, above, False, within(ratio, low, high), weight)


def _cut(expected: Expected, token: Token) -> Expected:
    """Return the expected values with a slope of 0 beyond 20 nats."""
    return expected._replace(slope=0.0, weight=0.0) if abs(token.gap) > 20 else expected


def clip(token: Token, _: float) -> Expected:
    expected = _clipped(math.exp(near(token.gap)), token.advantage, 0.8, 1.28)
    if token.advantage < 0 and -3 * token.advantage < expected.loss:
        expected = expected._replace(loss=-3 * token.advantage, slope=0.0, weight=0.0, bounded=True)
    return _cut(expected, token)


def penalty(token: Token, _: float) -> Expected:
    gap, A = near(token.gap), token.advantage
    ratio = math.exp(gap)
    loss, slope = -ratio * A + 0.5 * (ratio - 1 - gap), -ratio * A + 0.5 * (ratio - 1)
    return _cut(Expected(loss, slope, False, False, False, ratio / (1 + ratio), ratio), token)


def dis(token: Token, _: float) -> Expected:
    ratio = math.exp(near(token.gap))
    weight = ratio if 0.2 <= ratio <= 4 else 0.0
    slope = -token.advantage * weight
    expected = Expected(slope * token.new, slope, ratio < 0.2, ratio > 4, False, within(ratio, 0.2, 4), weight)
    return _cut(expected, token)


def cispo(token: Token, _: float) -> Expected:
    ratio = math.exp(near(token.gap))
    weight = min(max(ratio, 0.5), 5.0)
    slope = -token.advantage * weight
    return Expected(slope * token.new, slope, ratio < 0.5, ratio > 5, False, within(ratio, 0.5, 5), weight)


def gspo(token: Token, mean_gap: float) -> Expected:
    return _cut(_clipped(math.exp(mean_gap), token.advantage, 0.9, 1.2), token)


def sapo(token: Token, _: float) -> Expected:
    ratio, A = math.exp(near(token.gap)), token.advantage
    tau = 1.0 if A > 0 else 1.05
    gate = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700)))
    weight = 4 * ratio * gate * (1 - gate)
    return _cut(Expected(-A * gate * 4 / tau, -A * weight, False, False, False, gate, weight), token)


def _left_out(token: Token, change: float) -> Expected:
    below, above = token.advantage < 0 and change < -0.1, token.advantage > 0 and change > 0.2
    weight = 0.0 if below or above else min(math.exp(near(token.gap)), 3.0)
    slope = -token.advantage * weight
    return Expected(slope * token.new, slope, below, above, False, within(change, -0.1, 0.2), weight)


def dppo_tv(token: Token, _: float) -> Expected:
    return _left_out(token, math.exp(token.new) - math.exp(token.new - token.gap))


def dppo_kl(token: Token, _: float) -> Expected:
    new, old = math.exp(token.new), math.exp(token.new - token.gap)
    if old > 1:  # not a probability
        old = math.nan
    divergence = old * -token.gap + (1 - old) * math.log((1 - old) / (1 - new))
    return _left_out(token, divergence if new > old else -divergence)


LOSSES: dict[str, tuple[Callable[[Token, float], Expected], dict[str, float]]] = {
    "clip": (clip, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}),
    "penalty": (penalty, {"penalty_coef": 0.5}),
    "dis": (dis, {"band_low": 0.8, "band_high": 3.0}),
    "cispo": (cispo, {"band_low": 0.5, "band_high": 4.0}),
    "gspo": (gspo, {"band_low": 0.1, "band_high": 0.2}),
    "sapo": (sapo, {}),
    "dppo_tv": (dppo_tv, {"band_low": 0.1, "band_high": 0.2, "band_cap": 3.0}),
    "dppo_kl": (dppo_kl, {"band_low": 0.1, "band_high": 0.2, "band_cap": 3.0}),
}


def tokens_of(name: str) -> list[list[Token]]:
    """Return the updates. For `dppo_*` the old probability of each token is at most 1."""
    return (
        [[t._replace(new=min(t.new, t.gap - 0.5)) for t in update] for update in UPDATES] if "dppo" in name else UPDATES
    )


def mean_gap(token: Token, update: list[Token]) -> float:
    return float(np.mean([near(t.gap) for t in update if t.sequence == token.sequence]))


def expected_metrics(name: str) -> dict[str, float]:
    """Return the metrics as described in POLICY_METRICS. Terms are means over updates. Other metrics use all tokens."""
    formula, updates = LOSSES[name][0], tokens_of(name)
    of_updates = [[formula(t, mean_gap(t, update)) for t in update] for update in updates]
    tokens = [t for update in updates for t in update]
    expected = [e for update in of_updates for e in update]
    ratios = np.exp([near(t.gap) for t in tokens])
    k3 = [math.exp(-(t.new - t.ref)) - 1 + t.new - t.ref for t in tokens]
    w = np.array([e.weight * t.importance for e, t in zip(expected, tokens, strict=True)])
    pairs = list(zip(expected, tokens, strict=True))
    terms = {
        "pg_loss": sum(t.weight * t.importance * e.loss for e, t in pairs) / 2,
        "entropy_loss": -0.1 * sum(t.weight * t.entropy for t in tokens) / 2,
        "kl_loss": 0.2 * sum(t.weight * min(x, 10.0) for t, x in zip(tokens, k3, strict=True)) / 2,
        "nll_loss": -sum(t.nll * t.new for t in tokens) / 2,
    }
    return {
        **terms, "loss": sum(terms.values()), "clipfrac": np.mean([e.below or e.above for e in expected]),
        "clipfrac_lower": np.mean([e.bounded for e in expected]), "ppo_kl": -np.mean([near(t.gap) for t in tokens]),
        "ppo_kl_k3": np.mean(ratios - 1 - np.log(ratios)), "ratio": ratios.mean(), "ratio_max": ratios.max(),
        "entropy": np.mean([t.entropy for t in tokens]), "masked_below": np.mean([e.below for e in expected]),
        "masked_above": np.mean([e.above for e in expected]), "band_position": np.mean([e.position for e in expected]),
        "effective_sample_size": w.sum() ** 2 / (len(w) * (w**2).sum()), "ref_kl": np.mean(np.minimum(k3, 10.0)),
    }  # fmt: skip


def computed(name: str, update: list[Token], dtype: torch.dtype) -> tuple[Loss, torch.Tensor]:
    """Return the loss of an update and the slopes. The last token is masked and has garbage."""

    def column(key: str, garbage: float = math.nan) -> torch.Tensor:
        return torch.tensor([*(getattr(t, key) for t in update), garbage], dtype=dtype)

    logprob = column("new").requires_grad_()
    inputs = PolicyInputs(
        old_logprob=torch.tensor([*(t.new - t.gap for t in update), math.inf], dtype=dtype),
        advantages=column("advantage"), weights=column("weight"), mask=torch.tensor([True] * len(update) + [False]),
        ref_logprob=column("ref"), importance_weights=column("importance"), nll_weights=column("nll"),
        sequences=torch.tensor([*(t.sequence for t in update), 9]),
    )  # fmt: skip
    objective = PolicyObjective(policy_loss=name, entropy_coef=0.1, kl_coef=0.2, **LOSSES[name][1])  # type: ignore[arg-type]
    out = ppo_token_loss(logprob=logprob, entropy=column("entropy"), inputs=inputs, objective=objective)
    return out, torch.autograd.grad(out.loss, logprob)[0]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", LOSSES)
def test_metrics_of_the_policy_match_their_descriptions(name: str, backend: Backend) -> None:
    reports, dtype = [], torch.float64 if backend == "torch" else torch.float32
    for update in tokens_of(name):
        with use_backend(backend):
            out, slopes = computed(name, update, dtype)
        reports.append({key: float(x) for key, x in out.metrics.items()})
        of_tokens = [LOSSES[name][0](t, mean_gap(t, update)) for t in update]
        for t, e, slope in zip(update, of_tokens, slopes.tolist(), strict=False):
            x = t.new - t.ref
            kl_slope = 0.0 if abs(x) > 20 or math.exp(-x) - 1 + x > 10 else 1 - math.exp(-x)
            exact = t.weight * (t.importance * e.slope + 0.2 * kl_slope) - t.nll
            assert slope == pytest.approx(exact, rel=1e-5, abs=1e-6), (name, t)
    numbers, expected = shown(reports), expected_metrics(name)
    documented = {key for key, metric in POLICY_METRICS.items() if metric.kind != "spread"}
    assert set(numbers) == documented == set(expected)
    tolerance = 1e-7 if backend == "torch" else 2e-5
    for key, value in expected.items():
        assert numbers[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("gap", [20.5, 25.0, 80.0, 400.0])
def test_bounded_weights_keep_slopes_beyond_the_limit(name: str, gap: float, backend: Backend) -> None:
    """The probability increased for a negative advantage and decreased for a positive advantage."""
    update = [
        Token(gap, -2.0, new=-0.5, weight=1.0, ref=-0.5),
        Token(-gap, 2.0, new=-gap - 0.5, weight=1.0, ref=-gap - 0.5),
    ]
    with use_backend(backend):
        out, slopes = computed(name, update, torch.float32)
    largest = 5.0 if name == "cispo" else 3.0
    smallest = 0.5 if name == "cispo" else math.exp(-20)
    assert slopes.tolist() == pytest.approx([2 * largest, -2 * smallest, 0.0], rel=1e-5)
    assert all(x.isfinite() for x in out.metrics.values())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_effective_sample_size_includes_the_correction(level: str) -> None:
    """The test uses the first update. Weights are per token or per sample of two tokens."""
    weights = np.array([2.0, 0.5, 1.0, 1.0] if level == "token" else [2.0, 2.0, 0.5, 0.5])
    update = [Token(0.0, 1.0, importance=float(w)) for w in weights]
    out, _ = computed("clip", update, torch.float64)
    size = shown([{key: float(x) for key, x in out.metrics.items()}])["effective_sample_size"]
    assert size == pytest.approx(weights.sum() ** 2 / (4 * (weights**2).sum()), rel=1e-9) and size < 0.9


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_metrics_of_the_critic_match_their_descriptions(backend: Backend) -> None:
    """The two updates have three tokens and one token: (value, old value, return, weight)."""
    updates = [[(1.0, 0.0, 3.0, 0.5), (2.0, 0.0, 3.0, 0.25), (0.1, 0.0, 1.0, 0.25)], [(-1.0, 0.5, 0.0, 1.0)]]
    reports, terms, clipped = [], [], []
    for update in updates:
        v, old, r, w = (torch.tensor([*column, math.nan]) for column in zip(*update, strict=True))
        mask = torch.tensor([True] * len(update) + [False])
        with use_backend(backend):
            arguments: dict[str, Any] = {"values": v, "old_values": old, "returns": r, "weights": w, "mask": mask}
            out = ppo_value_loss(**arguments, value_clip=0.2)
        reports.append({key: float(x) for key, x in out.metrics.items()})
        near_old = [min(max(x, o - 0.2), o + 0.2) for x, o, _, _ in update]
        squares = [((x - y) ** 2, (n - y) ** 2) for (x, _, y, _), n in zip(update, near_old, strict=True)]
        terms.append(sum(weight * max(pair) / 2 for (*_, weight), pair in zip(update, squares, strict=True)))
        clipped += [pair[1] > pair[0] for pair in squares]
    numbers = shown(reports)
    assert set(numbers) == set(VALUE_METRICS)
    assert numbers == pytest.approx({"loss": np.mean(terms), "clipfrac": np.mean(clipped)}, rel=1e-6)
