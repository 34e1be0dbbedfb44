"""Examples of `megappo guide ppo`, computed by the functions of the trainer in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megappo.algo.controllers import AdaptiveKLController
from megappo.algo.correction import importance_weights
from megappo.algo.estimators import builtin
from megappo.algo.kl import apply_kl_to_rewards
from megappo.commands.guide import text_of
from megappo.config.sections.roles import ActorSettings
from megappo_kernels.gae import gae
from megappo_kernels.losses import PolicyInputs, ppo_token_loss, ppo_value_loss
from megappo_kernels.objectives import PolicyObjective, kl_estimate
from megappo_kernels.whiten import masked_whiten, masked_whiten_stats

TEXT = " ".join(text_of("ppo").split())


def row(values: Sequence[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def ones_like(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def decimal_text(values: Tensor, digits: int) -> str:
    """Format numbers in the style of the guide."""
    return ", ".join(f"{float(x):.{digits}f}" for x in values.flatten())


def short(values: Tensor) -> str:
    """Format numbers with four significant digits without trailing zeros."""
    return ", ".join(f"{float(x):.4g}" for x in values.flatten())


def clipped_loss(ratio: float, advantage: float, dual_clip: float | None = None) -> tuple[float, float]:
    """Return the loss and the gradient of one token."""
    logprob = row([math.log(ratio)]).requires_grad_()
    inputs = PolicyInputs(row([0.0]), row([advantage]), row([1.0]), ones_like(logprob))
    loss = ppo_token_loss(logprob=logprob, inputs=inputs, objective=PolicyObjective(dual_clip=dual_clip)).loss
    loss.backward()
    assert logprob.grad is not None
    return loss.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("old", "new", "advantage"), [(0.2, 0.22, 1), (0.2, 0.3, 1), (0.2, 0.1, 1), (0.2, 0.3, -1), (0.2, 0.1, -1)]
)
def test_clipped_loss_table(old: float, new: float, advantage: float) -> None:
    loss, gradient = clipped_loss(new / old, advantage)
    has_gradient = "yes" if gradient else "no"
    assert f"| {old:.2f} to {new:.2f} | {new / old:.2f} | {advantage} | {loss:.2f} | {has_gradient}" in TEXT


def test_dual_clip_example() -> None:
    assert clipped_loss(5, -1)[0] == pytest.approx(5)
    loss, gradient = clipped_loss(5, -1, dual_clip=3)
    assert f"for r = 5 and A = -1 the loss is {loss:.0f} instead of 5, and there is no gradient" in TEXT
    assert gradient == 0


def test_correction_weight_examples() -> None:
    old, engine = row([math.log(0.6), math.log(0.6)]), row([math.log(0.5), math.log(0.1)])
    weights, _ = importance_weights(old_logprob=old, engine_logprob=engine, mask=ones_like(old), cap=2)
    first, second = weights[0].tolist()
    assert f"The correction weight is {first:.1f}." in TEXT
    assert f"the ratio is {0.6 / 0.1:.0f} and the weight is the cap, {second:.0f}." in TEXT


@pytest.mark.parametrize(("name", "kind"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_estimator_table(name: str, kind: str) -> None:
    above, below = kl_estimate(row([0.5, -0.5]), kind)[0].tolist()
    assert torch.equal(kl_estimate(row([0.5, -0.5]), kind), kl_estimate(row([0.5, -0.5]), name))
    (line,) = [line for line in text_of("ppo").splitlines() if line.startswith(f"| {name} |")]
    assert line.endswith(f"| {above:.4f} | {below:.4f} |") and f"`{kind}`, `{name}`" in line


def test_expectation_of_kl_estimators() -> None:
    actor, reference = row([0.5, 0.5]), row([0.25, 0.75])
    exact = float((actor * (actor / reference).log()).sum())
    assert f"KL(actor || reference) = 0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75) = {exact:.4f}" in TEXT
    k1, k2, k3 = (float((actor * kl_estimate((actor / reference).log(), kind)).sum()) for kind in ("k1", "k2", "k3"))
    assert k1 == pytest.approx(exact) and k3 == pytest.approx(exact)
    assert f"under the actor are {k1:.4f} for k1, {k2:.4f} for k2 and {k3:.4f} for k3." in TEXT
    other = float((reference * (reference / actor).log()).sum())
    assert f"KL(reference || actor) is {other:.4f}." in TEXT


def test_gradient_of_k1_has_expectation_zero() -> None:
    """The expectation over samples of the actor, at actor probabilities (0.5, 0.5)."""
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    reference = row([0.25, 0.75])[0].log()
    for kind, is_zero in (("k1", True), ("k2", False), ("k3", False)):
        logprob = logits.log_softmax(0)
        expected = (logprob.detach().exp() * kl_estimate(logprob - reference, kind)).sum()
        (gradient,) = torch.autograd.grad(expected, logits)
        assert bool(gradient.abs().max() < 1e-12) is is_zero, kind


def test_kl_in_reward_example() -> None:
    kl = row([0.2, -0.1, 0.3])
    scores = torch.tensor([1.0], dtype=torch.float64)
    rewards = apply_kl_to_rewards(scores=scores, kl=kl, mask=ones_like(kl), coef=0.1)
    assert rewards[0].tolist() == pytest.approx([-0.02, 0.01, 0.97])
    assert "have the rewards -0.02, 0.01 and 0.97." in TEXT


def test_adaptive_coefficient_example() -> None:
    controller = AdaptiveKLController(0.1, target=0.01, horizon=10000)
    controller.update(0.03, 256)
    assert f"the coefficient becomes {controller.value:.6f}." in TEXT


@pytest.mark.parametrize("lam", [1, 0.95, 0])
def test_advantage_table(lam: float) -> None:
    values = row([0.5, 0.6, 0.8])
    advantages, returns = gae(row([0, 0, 1]), values, ones_like(values), gamma=1.0, lam=lam)
    assert f"| {lam} | {short(advantages)} | {short(returns)} |" in TEXT
    assert f"0.95^100 = {0.95**100:.4f}." in TEXT


def test_whitening_example() -> None:
    advantages = row([0.5, 0.4, 0.2])
    mask = ones_like(advantages)
    white = masked_whiten(advantages, mask, masked_whiten_stats(advantages, mask))
    assert f"0.5, 0.4 and 0.2 become {decimal_text(white, 4).replace(', -', ' and -')}." in TEXT


def test_group_estimator_examples() -> None:
    rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0]], dtype=torch.float64)
    inputs = {
        "rewards": rewards, "mask": ones_like(rewards), "group_ids": torch.zeros(4, dtype=torch.int64), "lam": 1.0,
    }  # fmt: skip
    for name in ("rloo", "grpo"):
        advantages, _ = builtin(name)(**inputs)
        (line,) = [part for part in TEXT.split("- `")[1:] if part.startswith(f"{name}` subtracts")]
        assert f": {decimal_text(advantages, 4)}." in line
    assert f"the standard deviation of the group ({rewards.std().item():.4f})" in TEXT


def test_value_loss_example() -> None:
    values = row([0.9]).requires_grad_()
    loss = ppo_value_loss(
        values=values, old_values=row([0.5]), returns=row([1.0]), weights=row([1.0]), mask=ones_like(values),
        value_clip=0.2,
    ).loss  # fmt: skip
    loss.backward()
    assert f"give max(0.01, 0.09) / 2 = {loss.item():.3f}, and the token has no gradient." in TEXT
    assert values.grad is not None and values.grad.item() == 0


def test_number_of_updates() -> None:
    one, four = (ActorSettings(minibatch_sequences=64, epochs=epochs).updates(256) for epochs in (1, 4))
    assert f"and 1 epoch makes {one} updates; with 4 epochs it makes {four} updates." in TEXT
