"""The golden numbers of the algorithm, worked out by hand or taken from the papers."""

from __future__ import annotations

import pytest
import torch

from megappo import algo

t = torch.tensor


def approx(value: float, tolerance: float = 1e-5) -> object:
    return pytest.approx(value, rel=tolerance, abs=tolerance)


def test_gae_skips_masked_tokens() -> None:
    advantages, returns = algo.compute_gae(
        rewards=t([[0.0, 0, 0, 1]]),
        values=t([[0.2, 0.3, 0.4, 0.5]]),
        mask=t([[False, False, True, True]]),
        gamma=0.99,
        lam=0.95,
    )
    assert advantages.tolist() == [[0, 0, approx(0.56525), approx(0.5)]]
    assert returns.tolist() == [[0, 0, approx(0.96525), approx(1.0)]]


def test_clip_loss() -> None:
    result = algo.policy_loss(
        logprob=t([-1.5]),
        old_logprob=t([-2.0]),
        advantages=t([0.5]),
        weights=t([1.0]),
        mask=t([True]),
        clip_low=0.2,
        clip_high=0.2,
    )
    assert result.metrics["ratio"].item() == approx(1.6487, 1e-4)
    assert result.loss.item() == approx(-0.6)
    assert result.metrics["clipfrac"].item() == 1


@pytest.mark.parametrize(("p", "q", "kl"), [([0.8, 0.2], [0.7, 0.3], 0.02573), ([0.9, 0.1], [0.5, 0.5], 0.3681)])
def test_expected_k1_is_the_divergence(p: list[float], q: list[float], kl: float) -> None:
    estimate = algo.kl_penalty(logprob=t(p).log(), ref_logprob=t(q).log(), kind="k1")
    assert (t(p) * estimate).sum().item() == approx(kl, 2e-4)
    if p[0] == 0.8:
        assert estimate.tolist() == [approx(0.1335, 1e-3), approx(-0.4055, 1e-3)]
    # k3 has the same expectation and is never negative.
    k3 = algo.kl_penalty(logprob=t(p).log(), ref_logprob=t(q).log(), kind="k3")
    assert (t(p) * k3).sum().item() == approx(kl, 2e-4)
    assert (k3 >= 0).all()


def test_kl_in_the_reward() -> None:
    rewards = algo.apply_kl_to_rewards(
        scores=t([1.0]),
        kl=t([[0.03, 0.02, 0.01, 0.02, 0.03, 0.05]]),
        mask=torch.ones(1, 6, dtype=torch.bool),
        coef=0.01,
    )
    assert rewards[0].tolist() == [approx(x) for x in (-0.0003, -0.0002, -0.0001, -0.0002, -0.0003, 1 - 0.0005)]


def test_score_goes_to_the_last_valid_token() -> None:
    mask = t([[True, True, False], [True, False, False]])
    rewards = algo.apply_kl_to_rewards(scores=t([2.0, 3.0]), kl=torch.zeros(2, 3), mask=mask, coef=0.1)
    assert rewards.tolist() == [[0, 2, 0], [3, 0, 0]]


@pytest.mark.parametrize(("kl", "factor"), [(12.0, 1.2), (6.6, 1.1), (3.0, 0.8), (6.0, 1.0)])
def test_adaptive_controller(kl: float, factor: float) -> None:
    controller = algo.AdaptiveKLController(0.1, target=6.0, horizon=100)
    controller.update(kl, n_steps=100)
    assert controller.value == approx(0.1 * factor)
    copy = algo.AdaptiveKLController(9.0, target=6.0, horizon=100)
    copy.load_state_dict(controller.state_dict())
    assert copy.value == controller.value


def test_fixed_controller_stays_and_refuses_nan() -> None:
    controller = algo.FixedKLController(0.3)
    controller.update(100.0, 10)
    assert controller.value == 0.3
    with pytest.raises(ValueError, match="must be finite"):
        controller.update(float("nan"), 1)


@pytest.mark.parametrize(("kl", "value"), [(0.016, 2.0), (0.006, 0.5), (0.01, 1.0)])
def test_penalty_controller(kl: float, value: float) -> None:
    controller = algo.PenaltyController(1.0, target=0.01)
    controller.update(kl, 1)
    assert controller.value == value


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        ("token-mean", (1 + 2 + 3) / 3),
        ("seq-mean-token-sum", (3 + 3) / 2),
        ("seq-mean-token-mean", (1.5 + 3) / 2),
        ("seq-mean-token-sum-norm", (3 + 3) / (2 * 3)),
    ],
)
def test_aggregation(mode: str, loss: float) -> None:
    losses = t([[1.0, 2.0, float("nan")], [3.0, float("inf"), 0.0], [5.0, 5.0, 5.0]])
    mask = t([[True, True, False], [True, False, False], [False, False, False]])
    assert algo.aggregate(loss=losses, mask=mask, mode=mode).item() == approx(loss)
    assert algo.aggregate(loss=losses, mask=mask, mode="seq-mean-token-sum-norm", norm_tokens=6).item() == approx(
        6 / 12
    )


def test_dual_clip_bounds_only_negative_advantages() -> None:
    both = algo.policy_loss(
        logprob=t([3.0, 3.0]),
        old_logprob=t([0.0, 0.0]),
        advantages=t([-1.0, 1.0]),
        weights=t([1.0, 1.0]),
        mask=t([True, True]),
        dual_clip=3.0,
    )
    assert both.loss.item() == approx(3.0 - 1.2)
    assert both.metrics["clipfrac_lower"].item() == 1


def test_log_ratio_is_clamped() -> None:
    logprob = t([500.0, -500.0], requires_grad=True)
    result = algo.policy_loss(
        logprob=logprob,
        old_logprob=t([0.0, 0.0]),
        advantages=t([-1.0, 1.0]),
        weights=t([1.0, 1.0]),
        mask=t([True, True]),
    )
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert logprob.grad is not None
    assert logprob.grad.tolist() == [0, 0]
    assert result.metrics["ratio_max"].item() == approx(torch.exp(t(20.0)).item(), 1e-4)


def test_grpo_and_rloo_against_their_papers() -> None:
    mask = t([[True, True], [True, False], [True, True], [True, True]])
    rewards = t([[0.0, 1.0], [3.0, 9.0], [0.0, 5.0], [0.0, 2.0]])  # scores 1, 3, 5 of one prompt, 2 of another
    arguments = {
        "rewards": rewards,
        "values": None,
        "mask": mask,
        "group_ids": t([7, 7, 7, 1]),
        "gamma": 1.0,
        "lam": 1.0,
    }
    grpo, _ = algo.get_estimator("grpo")(**arguments)
    assert grpo[:, 0].tolist() == [approx(-1, 1e-4), approx(0), approx(1, 1e-4), approx(2)]
    assert grpo[1, 1] == 0
    rloo, _ = algo.get_estimator("rloo")(**arguments)
    assert rloo[:, 0].tolist() == [approx(-3), approx(0), approx(3), approx(2)]
    plus, _ = algo.get_estimator("reinforce_plus_plus")(**(arguments | {"gamma": 0.5}))
    assert plus.tolist() == [[0.5, 1], [3, 0], [2.5, 5], [1, 2]]


def test_importance_weights() -> None:
    old, engine = t([[0.0, -1.0, 0.0]]), t([[-2.0, -1.5, float("nan")]])
    mask = t([[True, True, False]])
    weights, keep = algo.importance_weights(
        old_logprob=old, engine_logprob=engine, mask=mask, cap=3.0, reject_above=5.0
    )
    assert weights.tolist() == [[3.0, approx(1.64872), 1.0]]
    assert keep.tolist() == [[False, True, False]]
    weights, _ = algo.importance_weights(old_logprob=old, engine_logprob=engine, mask=mask, level="sequence", cap=100.0)
    assert weights.tolist() == [[approx(12.1825), approx(12.1825), 1.0]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: algo.kl_penalty(logprob=t([0.0]), ref_logprob=t([0.0]), kind="low_var"), "did you mean 'low_var_kl'"),
        (lambda: algo.get_estimator("gea"), "did you mean 'gae'"),
        (lambda: algo.aggregate(loss=t([[1.0]]), mask=t([[True]]), mode="mean"), "token-mean"),
        (lambda: algo.masked_mean(values=t([1.0]), mask=t([True, True])), "must be the mask's"),
        (
            lambda: algo.get_estimator("gae")(
                rewards=t([[1.0]]), values=None, mask=t([[True]]), group_ids=t([0]), gamma=1.0, lam=1.0
            ),
            "needs values",
        ),
    ],
)
def test_bad_arguments_get_a_sentence(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        call()


def test_masks_are_bool() -> None:
    with pytest.raises(TypeError, match="must be torch.bool"):
        algo.masked_mean(values=t([1.0]), mask=t([1]))
