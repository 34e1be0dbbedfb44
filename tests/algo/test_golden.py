"""Golden numbers of the algorithm, computed by hand or copied from the papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch

from megappo.algo.aggregation import Aggregation, token_weights
from megappo.algo.controllers import AdaptiveKLController, FixedKLController, PenaltyController
from megappo.algo.correction import importance_weights
from megappo.algo.estimators import NAMES, builtin
from megappo.algo.kl import apply_kl_to_rewards
from megappo.algo.lambdas import length_adaptive
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.ppo.assembly.methods import lambdas
from megappo_kernels.backend import Backend, use_backend
from megappo_kernels.gae import gae
from megappo_kernels.losses import ppo_value_loss
from megappo_kernels.objectives import kl_estimate
from megappo_kernels.whiten import masked_whiten, masked_whiten_stats, merge_whiten_stats
from tests.support.kernels import token_loss
from tests.support.oracles.algorithm import aggregate

t = torch.tensor


def approx(value: float, tolerance: float = 1e-5) -> object:
    return pytest.approx(value, rel=tolerance, abs=tolerance)


def test_gae_skips_masked_tokens() -> None:
    advantages, returns = gae(
        rewards=t([[0.0, 0, 0, 1]]), values=t([[0.2, 0.3, 0.4, 0.5]]), mask=t([[False, False, True, True]]), gamma=0.99,
        lam=0.95,
    )  # fmt: skip
    assert advantages.tolist() == [[0, 0, approx(0.56525), approx(0.5)]]
    assert returns.tolist() == [[0, 0, approx(0.96525), approx(1.0)]]


def test_length_adaptive_lambda_and_critic_lambda() -> None:
    """For four tokens and a masked token lambda is 1 - 1 / (0.5 x 4) = 0.5. For one token 1 - 1 / 0.5 is below 0, so
    lambda is 0."""
    algorithm = AlgorithmSettings.model_validate({"lam": {"actor": {"length_adaptive": 0.5}, "critic": 1}})
    mask = t([[True, False, True, True, True], [True, False, False, False, False]])
    lam = lambdas(algorithm, mask)["lam"]
    assert isinstance(lam, torch.Tensor) and lam.tolist() == [0.5, 0.0]
    nan = float("nan")
    advantages, returns = builtin("gae")(
        rewards=t([[0, nan, 0, 0, 1.0], [1.0, nan, nan, nan, nan]]),
        values=t([[0.2, nan, 0.3, 0.4, 0.5], [0.25, nan, nan, nan, nan]]), mask=mask, group_ids=t([0, 1]), gamma=1.0,
        **lambdas(algorithm, mask),
    )  # fmt: skip
    # All deltas are 0.1 except the last delta.
    assert advantages.tolist() == [[approx(x) for x in (0.2375, 0, 0.275, 0.35, 0.5)], [0.75, 0, 0, 0, 0]]
    assert returns.tolist() == [[approx(x) for x in (1, 0, 1, 1, 1)], [1, 0, 0, 0, 0]]


def test_lambdas_of_long_responses() -> None:
    """The test uses alpha 0.05 of VAPO and 1.5 of SAO. Over a thousand tokens, a lambda of 0.95 discounts the score to
    almost 0. The default is therefore 1."""
    mask = torch.arange(1000) < t([[1], [20], [40], [1000]])
    assert length_adaptive(mask=mask, alpha=0.05).tolist() == [0, 0, 0.5, 0.98]
    assert length_adaptive(mask=mask, alpha=1.5).tolist() == [approx(x) for x in (1 / 3, 29 / 30, 59 / 60, 1499 / 1500)]
    assert lambdas(AlgorithmSettings(), mask) == {"lam": 1.0, "critic_lam": 1.0}
    algorithm = AlgorithmSettings.model_validate({"lam": {"actor": 0.95}})
    assert lambdas(algorithm, mask) == {"lam": 0.95, "critic_lam": 1.0}
    rewards, nothing = torch.zeros(1, 1000), torch.zeros(1, 1000)
    rewards[0, -1] = 1.0
    everywhere = torch.ones(1, 1000, dtype=torch.bool)
    arguments: dict[str, Any] = {"rewards": rewards, "values": nothing, "mask": everywhere, "gamma": 1.0}
    assert gae(**arguments, lam=0.95)[0][0, 0] < 1e-22 and gae(**arguments, lam=1.0)[0][0, 0] == 1


def test_clip_loss() -> None:
    result = token_loss(
        logprob=t([-1.5]), old_logprob=t([-2.0]), advantages=t([0.5]), weights=t([1.0]), mask=t([True]), clip_low=0.2,
        clip_high=0.2,
    )  # fmt: skip
    assert result.metrics["ratio"].item() == approx(1.6487, 1e-4)
    assert result.loss.item() == approx(-0.6)
    assert result.metrics["clipfrac"].item() == 1


@pytest.mark.parametrize(("p", "q", "kl"), [([0.8, 0.2], [0.7, 0.3], 0.02573), ([0.9, 0.1], [0.5, 0.5], 0.3681)])
def test_expected_k1_is_the_divergence(p: list[float], q: list[float], kl: float) -> None:
    estimate = kl_estimate(t(p).log() - t(q).log(), "k1")
    assert (t(p) * estimate).sum().item() == approx(kl, 2e-4)
    if p[0] == 0.8:
        assert estimate.tolist() == [approx(0.1335, 1e-3), approx(-0.4055, 1e-3)]
    # k3 has the same expectation and is never negative.
    k3 = kl_estimate(t(p).log() - t(q).log(), "k3")
    assert (t(p) * k3).sum().item() == approx(kl, 2e-4)
    assert (k3 >= 0).all()


def test_kl_in_the_reward() -> None:
    rewards = apply_kl_to_rewards(
        scores=t([1.0]),
        kl=t([[0.03, 0.02, 0.01, 0.02, 0.03, 0.05]]),
        mask=torch.ones(1, 6, dtype=torch.bool),
        coef=0.01,
    )
    assert rewards[0].tolist() == [approx(x) for x in (-0.0003, -0.0002, -0.0001, -0.0002, -0.0003, 1 - 0.0005)]


def test_score_goes_to_the_last_valid_token() -> None:
    mask = t([[True, True, False], [True, False, False]])
    rewards = apply_kl_to_rewards(scores=t([2.0, 3.0]), kl=torch.zeros(2, 3), mask=mask, coef=0.1)
    assert rewards.tolist() == [[0, 2, 0], [3, 0, 0]]


@pytest.mark.parametrize(("kl", "factor"), [(12.0, 1.2), (6.6, 1.1), (3.0, 0.8), (6.0, 1.0)])
def test_adaptive_controller(kl: float, factor: float) -> None:
    controller = AdaptiveKLController(0.1, target=6.0, horizon=100)
    controller.update(kl, n_steps=100)
    assert controller.value == approx(0.1 * factor)


FIXED = FixedKLController
ADAPTIVE = partial(AdaptiveKLController, target=6.0, horizon=100)
PENALTY = partial(PenaltyController, target=0.01)


@pytest.mark.parametrize("make", [FIXED, ADAPTIVE, PENALTY])
@pytest.mark.parametrize("before", [FIXED(0.0), FIXED(0.001), ADAPTIVE(0.1), PENALTY(0.1)])
def test_resumed_run_uses_a_changed_coefficient(
    make: Callable[[float], FixedKLController], before: FixedKLController
) -> None:
    before.update(12.0, 100)
    resumed = make(0.05)
    resumed.load_state_dict(before.state_dict())
    assert resumed.value == 0.05


@pytest.mark.parametrize(("make", "value"), [(FIXED, 0.05), (ADAPTIVE, 0.06), (PENALTY, 0.06)])
def test_resumed_run_keeps_an_adapted_coefficient(make: Callable[[float], FixedKLController], value: float) -> None:
    """Only adaptive controllers keep the coefficient. The checkpoint does not need the initial coefficient."""
    before = ADAPTIVE(0.05)
    before.update(12.0, 100)
    for state in (before.state_dict(), {"value": before.value}):
        resumed = make(0.05)
        resumed.load_state_dict(state)
        assert resumed.value == approx(value)


@pytest.mark.parametrize("samples", [100, 101, 500, 501, 65_536])
@pytest.mark.parametrize(("kl", "factor"), [(0.0, 0.8), (1e9, 1.2), (6.0, 1.0)])
def test_adaptive_coefficient_never_becomes_negative(samples: int, kl: float, factor: float) -> None:
    """A step with more samples than the horizon has the same effect as a step with `horizon` samples."""
    controller = AdaptiveKLController(0.1, target=6.0, horizon=100)
    controller.update(kl, n_steps=samples)
    assert controller.value == approx(0.1 * factor)
    for _ in range(5):
        controller.update(0.0, n_steps=samples)
    assert controller.value == approx(0.1 * factor * 0.8**5)


def test_fixed_controller_is_constant_and_rejects_nan() -> None:
    controller = FixedKLController(0.3)
    controller.update(100.0, 10)
    assert controller.value == 0.3
    with pytest.raises(ValueError, match="must be finite"):
        controller.update(float("nan"), 1)


@pytest.mark.parametrize(("kl", "value"), [(0.016, 2.0), (0.006, 0.5), (0.01, 1.0)])
def test_penalty_controller(kl: float, value: float) -> None:
    controller = PenaltyController(1.0, target=0.01)
    controller.update(kl, 1)
    assert controller.value == value


@pytest.mark.parametrize(("kl", "bound"), [(0.0, 2.0**-10), (0.006, 2.0**-10), (0.016, 2.0**10), (50.0, 2.0**10)])
def test_penalty_recovers_from_its_bounds(kl: float, bound: float) -> None:
    """The penalty has a lower and an upper bound. The lower bound also applies to a checkpoint with a
    coefficient of 0."""
    controller = PenaltyController(3.0, target=0.01)
    for _ in range(2000):
        controller.update(kl, 1)
    assert controller.value == 3 * bound
    for _ in range(10):
        controller.update(50.0 if bound < 1 else 0.0, 1)
    assert controller.value == 3
    controller.load_state_dict({"value": 0.0})
    controller.update(50.0, 1)
    assert controller.value == 3 * 2.0**-9


@pytest.mark.parametrize(
    ("mode", "loss"),
    [("token-mean", (1 + 2 + 3) / 3), ("seq-mean-token-sum", (3 + 3) / 2), ("seq-mean-token-mean", (1.5 + 3) / 2),
     ("seq-mean-token-sum-norm", (3 + 3) / (2 * 3))],
)  # fmt: skip
def test_aggregation(mode: Aggregation, loss: float) -> None:
    losses = t([[1.0, 2.0, float("nan")], [3.0, float("inf"), 0.0], [5.0, 5.0, 5.0]])
    mask = t([[True, True, False], [True, False, False], [False, False, False]])
    assert aggregate(loss=losses, mask=mask, mode=mode).item() == approx(loss)
    assert aggregate(loss=losses, mask=mask, mode="seq-mean-token-sum-norm", norm_tokens=6).item() == approx(6 / 12)


def test_microbatch_weights_use_minibatch_totals() -> None:
    """The microbatch has 4 of the 10 tokens and 2 of the 5 sequences. The tokens of a sequence
    share a weight of one fifth, or each token has a fixed part of one fifth."""
    mask = t([[True, True, True, False], [False, True, False, False]])
    expected: dict[Aggregation, tuple[float, float]] = {
        "token-mean": (1 / 10, 1 / 10),
        "seq-mean-token-sum": (1 / 5, 1 / 5),
        "seq-mean-token-mean": (1 / 5 / 3, 1 / 5),
        "seq-mean-token-sum-norm": (1 / 5 / 4, 1 / 5 / 4),
    }
    for mode, (of_three, alone) in expected.items():
        weights = token_weights(mask=mask, mode=mode, total_tokens=10, total_sequences=5)
        assert weights.tolist() == [[approx(of_three)] * 3 + [0], [0, approx(alone), 0, 0]], mode


def test_dual_clip_bounds_only_negative_advantages() -> None:
    both = token_loss(
        logprob=t([3.0, 3.0]), old_logprob=t([0.0, 0.0]), advantages=t([-1.0, 1.0]), weights=t([1.0, 1.0]),
        mask=t([True, True]), dual_clip=3.0,
    )  # fmt: skip
    assert both.loss.item() == approx(3.0 - 1.2)
    assert both.metrics["clipfrac_lower"].item() == 1


def test_log_ratio_is_clamped() -> None:
    logprob = t([500.0, -500.0], requires_grad=True)
    result = token_loss(
        logprob=logprob, old_logprob=t([0.0, 0.0]), advantages=t([-1.0, 1.0]), weights=t([1.0, 1.0]),
        mask=t([True, True]),
    )  # fmt: skip
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert logprob.grad is not None
    assert logprob.grad.tolist() == [0, 0]
    assert result.metrics["ratio_max"].item() == approx(torch.exp(t(20.0)).item(), 1e-4)


def test_grpo_and_rloo_match_their_papers() -> None:
    mask = t([[True, True], [True, False], [True, True], [True, True]])
    rewards = t([[0.0, 1.0], [3.0, 9.0], [0.0, 5.0], [0.0, 2.0]])  # scores 1, 3 and 5 of one prompt, 2 of another
    arguments: dict[str, Any] = {
        "rewards": rewards, "values": None, "mask": mask, "group_ids": t([7, 7, 7, 1]), "gamma": 1.0, "lam": 1.0,
    }  # fmt: skip
    grpo, _ = builtin("grpo")(**arguments)
    assert grpo[:, 0].tolist() == [approx(-1, 1e-4), approx(0), approx(1, 1e-4), approx(2)]
    assert grpo[1, 1] == 0
    rloo, _ = builtin("rloo")(**arguments)
    assert rloo[:, 0].tolist() == [approx(-3), approx(0), approx(3), approx(2)]
    plus, _ = builtin("reinforce_plus_plus")(**(arguments | {"gamma": 0.5}))
    assert plus.tolist() == [[0.5, 1], [3, 0], [2.5, 5], [1, 2]]


def test_importance_weights() -> None:
    old, engine = t([[0.0, -1.0, 0.0]]), t([[-2.0, -1.5, float("nan")]])
    mask = t([[True, True, False]])
    weights, keep = importance_weights(old_logprob=old, engine_logprob=engine, mask=mask, cap=3.0, reject_above=5.0)
    assert weights.tolist() == [[3.0, approx(1.64872), 1.0]]
    assert keep.tolist() == [[False, True, False]]
    weights, _ = importance_weights(old_logprob=old, engine_logprob=engine, mask=mask, level="sequence", cap=100.0)
    assert weights.tolist() == [[approx(12.1825), approx(12.1825), 1.0]]
    # Ratios of e^2 and e^0.5 have the geometric mean e^1.25.
    weights, keep = importance_weights(
        old_logprob=old, engine_logprob=engine, mask=mask, level="geometric", cap=100.0, reject_below=3.5
    )
    assert weights.tolist() == [[approx(3.49034), approx(3.49034), 1.0]] and not keep.any()
    _, keep = importance_weights(old_logprob=old, engine_logprob=engine, mask=mask, cap=100.0, reject_below=1.7)
    assert keep.tolist() == [[True, False, False]]


def test_corrected_is_the_decoupled_objective() -> None:
    """The objective is pi_prox / pi_behav x min(u A, clip(u, 0.8, 1.2) A) with u = pi / pi_prox. The test computes
    three cases of (pi, pi_prox, pi_behav) by hand: (.6, .4, .5) with A = 1 is .8 x 1.2, (.3, .4, .2) with A = -1 is
    2 x -.8, and (.44, .4, .8) with A = 2 is .5 x 2.2."""
    new, prox, behaviour = (t(p).log() for p in ([0.6, 0.3, 0.44], [0.4, 0.4, 0.4], [0.5, 0.2, 0.8]))
    weights, keep = importance_weights(
        old_logprob=prox[None], engine_logprob=behaviour[None], mask=torch.ones(1, 3, dtype=torch.bool), cap=10.0
    )
    assert keep.all()
    for token, objective in enumerate((0.96, -1.6, 1.1)):
        one = slice(token, token + 1)
        result = token_loss(
            logprob=new[one], old_logprob=prox[one], advantages=t([1.0, -1.0, 2.0])[one], weights=t([1.0]),
            mask=t([True]), importance_weights=weights[0, one],
        )  # fmt: skip
        assert -result.loss.item() == approx(objective)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kl_estimate(t([0.0]) - t([0.0]), "low_var"), "did you mean 'low_var_kl'"),
        (lambda: apply_kl_to_rewards(scores=t([1.0]), kl=t([[1.0]]), mask=t([[True, True]]), coef=1.0), "the mask's"),
        (
            lambda: builtin("gae")(
                rewards=t([[1.0]]), values=None, mask=t([[True]]), group_ids=t([0]), gamma=1.0, lam=1.0
            ),
            "requires values",
        ),
    ],
)
def test_bad_arguments_raise_a_clear_error(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


def test_masks_are_bool() -> None:
    with pytest.raises(TypeError, match="must be torch.bool"):
        apply_kl_to_rewards(scores=t([1.0]), kl=t([[1.0]]), mask=t([[1]]), coef=1.0)


@pytest.mark.parametrize(
    ("names", "estimates"),
    [(("kl", "k1"), [0.5, -0.5, -2.4, 9.0, 30.0, -30.0]), (("abs",), [0.5, 0.5, 2.4, 9.0, 30.0, 30.0]),
     (("mse", "k2"), [0.125, 0.125, 2.88, 40.5, 450.0, 450.0]),
     (("low_var_kl", "k3"), [0.106531, 0.148721, 7.623176, 8.000123, 10.0, 10.0])],
)  # fmt: skip
def test_kl_estimates_at_small_and_large_ratios(names: tuple[str, ...], estimates: list[float]) -> None:
    """The last two values exceed all clamps."""
    logprob = t([0.5, -0.5, -2.4, 9.0, 30.0, -30.0], dtype=torch.float64) - 1
    for name in names:
        result = kl_estimate(logprob - torch.full_like(logprob, -1.0), name)
        assert result.tolist() == [approx(x) for x in estimates]


def test_importance_weights_are_limited_above_the_cap() -> None:
    old, engine = t([[-1.0, -1.0, 39.0, -50.0]]), t([[-1.0, -2.0, 0.0, 0.0]])  # two ratios exceed the clamps
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    arguments: dict[str, Any] = {"old_logprob": old, "engine_logprob": engine, "mask": everywhere}
    weights, keep = importance_weights(**arguments, cap=1e10, reject_above=1.0)
    assert weights.tolist() == [[1, approx(2.718282), approx(math.exp(20)), approx(math.exp(-20), 1e-13)]]
    assert keep.tolist() == [[True, False, False, True]]
    weights, keep = importance_weights(**arguments, cap=1.0)
    assert weights.tolist() == [[1, 1, 1, approx(0, 1e-8)]] and keep.all()


def test_properties_of_the_estimators() -> None:
    properties = {
        e.name: (e.needs_critic, e.takes_values, e.compares_samples, e.whitens)
        for e in (builtin(name) for name in NAMES)
    }
    assert properties == {
        "gae": (True, True, False, True),
        "grpo": (False, False, True, False),
        "rloo": (False, False, True, False),
        "reinforce_plus_plus": (False, False, False, True),
    }
    rewards, values, mask = t([[0.0, 0, 0, 1]]), t([[0.2, 0.3, 0.4, 0.5]]), t([[False, False, True, True]])
    advantages, returns = builtin("gae")(
        rewards=rewards, values=values, mask=mask, group_ids=t([0]), gamma=0.99, lam=0.95
    )
    assert advantages.tolist() == [[0, 0, approx(0.56525), approx(0.5)]]
    assert returns.tolist() == [[0, 0, approx(0.96525), approx(1.0)]]


def test_token_scores_and_sample_scores_with_kl() -> None:
    kl, mask = t([[0.1, 0.2, 0.3]]), t([[True, True, False]])
    rewards = apply_kl_to_rewards(scores=t([[1.0, 2.0, 9.0]]), kl=kl, mask=mask, coef=0.5)
    assert rewards.tolist() == [[approx(0.95), approx(1.9), 0]]
    with pytest.raises(ValueError, match=r"scores has shape \(2,\), must be \(B,\) or the mask's \(1, 3\)"):
        apply_kl_to_rewards(scores=t([1.0, 2.0]), kl=kl, mask=mask, coef=0.5)
    empty = apply_kl_to_rewards(scores=t([1.0]), kl=kl, mask=torch.zeros_like(mask), coef=0.5)
    assert empty.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("values", "white"),
    [
        ([1e6 + 1, 1e6 + 2, 1e6 + 4, 1e6 + 7], [-1.0910895, -0.6546537, 0.2182179, 1.5275252]),
        ([1e6, 1e6, 1e6 + 1], [-0.7071068, -0.7071068, 1.4142136]),
        ([-(2.0**23), -(2.0**23), -(2.0**23) + 1], [-0.7071068, -0.7071068, 1.4142136]),
        ([2.0**24 - 2, 2.0**24 - 1, 2.0**24], [-1.2247449, 0.0, 1.2247449]),
        ([3e5 + 0.25, 3e5 + 0.5, 3e5, 3e5], [0.3015113, 1.5075567, -0.9045340, -0.9045340]),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_large_values_are_whitened_exactly(backend: Backend, values: list[float], white: list[float]) -> None:
    """The values are exact in float32, but their mean requires more digits than float32."""
    values_1T, mask = t([[*values, float("nan")]]), t([[True] * len(values) + [False]])
    with use_backend(backend):
        stats = masked_whiten_stats(values_1T, mask)
    assert masked_whiten(values_1T, mask, stats)[0].tolist() == [*(approx(x, 1e-6) for x in white), 0]


def test_whitening_and_aggregation_without_tokens() -> None:
    values, mask = t([[1.0, 3.0], [5.0, 7.0]]), t([[True, True], [False, False]])
    nothing = torch.zeros_like(mask)
    stats = masked_whiten_stats(values, mask)
    assert masked_whiten(values, mask, stats).tolist() == [[approx(-1), approx(1)], [0, 0]]
    stats = masked_whiten_stats(values, nothing)
    assert stats.tolist() == merge_whiten_stats(torch.stack([stats, stats])).tolist() == [0, 0, 0]
    assert masked_whiten(values, nothing, stats).abs().sum() == 0
    for mode in get_args(Aggregation):
        assert aggregate(loss=values, mask=nothing, mode=mode).item() == 0


def test_metrics_of_the_policy_loss() -> None:
    """The ratios are e^0.5, e^-0.5 and e^25, clamped to e^20. The last token is masked."""
    result = token_loss(
        logprob=t([-1.0, -2.0, -1.0, -1.0], dtype=torch.float64),
        old_logprob=t([-1.5, -1.5, -26.0, 0.0], dtype=torch.float64),
        advantages=t([1.0, -1.0, -1.0, 1.0], dtype=torch.float64),
        weights=t([0.5, 0.25, 0.25, 1.0], dtype=torch.float64), mask=t([True, True, True, False]), dual_clip=3.0,
        entropy=t([1.0, 2.0, 3.0, 100.0], dtype=torch.float64), entropy_coef=0.1,
        ref_logprob=t([-1.5, -1.5, -1.0, 9.0], dtype=torch.float64), kl="k1", kl_coef=0.2,
    )  # fmt: skip
    up, down, far = math.exp(0.5), math.exp(-0.5), math.exp(20)
    expected = {
        "clipfrac": 2.0,  # above for A > 0, below for A < 0
        "clipfrac_lower": 1.0,
        "ppo_kl": -(0.5 - 0.5 + 20),
        "ppo_kl_k3": up - 1 - 0.5 + down - 1 + 0.5 + far - 21,
        "ratio": up + down + far,
        "ratio_max": far,
        "entropy": 6.0,
        "masked_below": 1.0,
        "masked_above": 1.0,
        "band_position": 2.0,
        "token_weight.mean": 0.0,  # all three tokens are clipped or bounded
        "token_weight.m2": 0.0,
        "ref_kl": 0.5 - 0.5,
        "count": 3.0,
        "pg_loss": 0.5 * -1.2 + 0.25 * 0.8 + 0.25 * 3,
        "entropy_loss": -0.1 * (0.5 + 0.5 + 0.75),
        "kl_loss": 0.2 * (0.25 - 0.125),
        "nll_loss": 0.0,
    }
    expected["loss"] = expected["pg_loss"] + expected["entropy_loss"] + expected["kl_loss"]
    assert {name: value.item() for name, value in result.metrics.items()} == {n: approx(x) for n, x in expected.items()}
    assert result.loss.item() == approx(expected["loss"])


def test_metrics_of_the_value_loss() -> None:
    result = ppo_value_loss(
        values=t([2.0, 1.0, 1.0, 9.0]), old_values=t([1.0, 1.0, 0.5, 9.0]), returns=t([1.0, 3.0, 2.0, 9.0]),
        weights=t([1.0, 1.0, 0.5, 1.0]), mask=t([True, True, True, False]), value_clip=0.5,
    )  # fmt: skip
    # The clipped values are 1.5, 1 and 1. No clipped square is larger. A step at the limit is not clipped.
    assert result.loss.item() == approx(0.5 * (1 + 4 + 0.5))
    expected = {"clipfrac": 0, "count": 3, "loss": 2.75}
    assert {name: value.item() for name, value in result.metrics.items()} == {n: approx(x) for n, x in expected.items()}
