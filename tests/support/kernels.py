"""Inputs and gates that the kernel tests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megappo_kernels.losses import Loss, PolicyInputs, ppo_token_loss
from megappo_kernels.objectives import PolicyObjective
from tests.support.oracles import kernels as reference

KINDS = ("random", "peaky", "offset+150", "offset-150")


@dataclass
class Head:
    """An output layer's inputs, leaves that require gradients."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor

    def exact(self) -> Head:
        """The same in float64, leaves of their own."""
        hidden, weight = (x.detach().double().requires_grad_() for x in (self.hidden, self.weight))
        return Head(hidden, weight, self.labels)

    def gradients(self) -> list[Tensor]:
        grads = [self.hidden.grad, self.weight.grad]
        assert grads[0] is not None and grads[1] is not None
        return [g for g in grads if g is not None]


def head(kind: str, dtype: torch.dtype, *, rows: int, features: int, vocab: int, padding: int = 0) -> Head:
    """Logits of spread 1 (random), of spread 8 with clear winners (peaky), or around +-150."""
    g = torch.Generator().manual_seed(rows + vocab)
    hidden = torch.randn(rows, features, generator=g)
    weight = torch.randn(vocab + padding, features, generator=g) / features**0.5
    if kind == "peaky":
        weight *= 8
    if kind.startswith("offset"):
        hidden[:, 0], weight[:, 0] = 150.0, float(kind.removeprefix("offset")) / 150
    weight[vocab:] = 100.0  # what is padding must not be seen
    labels = torch.randint(0, vocab, (rows,), generator=g)
    labels[0], labels[-1] = 0, vocab - 1
    return Head(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels)


def relative(mine: Tensor, truth: Tensor) -> float:
    """Norm of the error over norm of the truth."""
    return float((mine.double() - truth.double()).norm() / truth.double().norm())


UNIT = 2.0**-24
"""Largest relative error of one rounding to float32."""


@dataclass(frozen=True)
class Rounding:
    """What float32 may lose on given logits, per row, whatever the processor, its instructions and its order of sums.

    n roundings that go either way add up like sqrt(n) steps, each at most UNIT times what is summed (Higham and Mary
    2019, "A New Approach to Probabilistic Rounding Error Analysis").
    """

    logprob_T: Tensor
    entropy_T: Tensor

    @property
    def worst(self) -> float:
        """Of all rows; also the relative error of a probability, which is what gradients of logits are made of."""
        return float(torch.maximum(self.logprob_T, self.entropy_T).max())

    @staticmethod
    def of_logits(logits_TV: Tensor, labels_T: Tensor, inherited_TV: Tensor | float = 0.0) -> Rounding:
        """From scaled logits in float64 and the errors that they came with."""
        logp_TV = logits_TV.log_softmax(-1)
        p_TV = logp_TV.exp()
        # Soft cap, temperature and the shift by the maximum round at the size of the logits.
        error_TV = inherited_TV + 4 * UNIT * logits_TV.abs()
        # The sum over the vocabulary; the maximum and the logarithm, which are added to it.
        total_T = UNIT * (logits_TV.shape[1] ** 0.5 + 2 * logits_TV.abs().amax(-1))
        label_T = error_TV.gather(1, labels_T[:, None]).squeeze(1)
        slope_TV = p_TV * (logp_TV - (p_TV * logp_TV).sum(-1, keepdim=True)).abs()  # of the entropy in the logits
        weighted_TV = slope_TV * (error_TV + UNIT * logits_TV.shape[1] ** 0.5)
        return Rounding(label_T + (p_TV * error_TV).sum(-1) + total_T, weighted_TV.sum(-1) + total_T)

    @staticmethod
    def of(case: Head, *, valid_vocab: int | None = None, **scaling: Any) -> Rounding:
        """From the factors of the logits: each is a sum of as many products as there are features."""
        hidden, weight = case.hidden.detach().double(), case.weight.detach().double()[:valid_vocab]
        logits = reference.scaled_logits(hidden @ weight.T, **scaling)
        temperature = scaling.get("temperature", 1.0)
        products = (
            hidden.abs() @ weight.abs().T / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
        )
        return Rounding.of_logits(logits, case.labels, UNIT * hidden.shape[1] ** 0.5 * products)


def policy_inputs(logprob: Tensor, seed: int, *, wide: bool = False, imitates: bool = False) -> PolicyInputs:
    """Ragged masks, garbage where masked, ratios inside and outside of the clip; of the type of `logprob`. Where it
    `imitates`, some tokens have a weight of their likelihood."""
    g = torch.Generator().manual_seed(seed)
    shape, dtype = logprob.shape, logprob.dtype
    spread = 15.0 if wide else 0.4
    mask = torch.rand(shape, generator=g) < 0.7

    def numbers(scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=g)).to(dtype)

    fields = {
        "old_logprob": logprob.detach() + numbers(spread),
        "advantages": numbers(),
        "weights": torch.rand(shape, generator=g).to(dtype) / mask.sum(),
        "ref_logprob": logprob.detach() + numbers(spread),
        "importance_weights": torch.rand(shape, generator=g).to(dtype) + 0.5,
    }
    if imitates:
        fields["nll_weights"] = torch.rand(shape, generator=g).to(dtype) * (torch.rand(shape, generator=g) < 0.3)
    garbage = torch.tensor([float("nan"), float("inf"), -1e30])
    for x in fields.values():
        x[~mask] = garbage[torch.randint(0, 3, (int((~mask).sum()),), generator=g)].to(dtype)
    return PolicyInputs(mask=mask, **fields)


def token_loss(*, logprob: Tensor, entropy: Tensor | None = None, **given: Any) -> Loss:
    """The product's policy loss by the words of the oracles: numbers of tokens and settings side by side."""
    settings = {name: given.pop(name) for name in PolicyObjective.__dataclass_fields__ if name in given}
    inputs, objective = PolicyInputs(**given), PolicyObjective(**settings)
    return ppo_token_loss(logprob=logprob, entropy=entropy, inputs=inputs, objective=objective)


def verl_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """The semantics verl publishes for conversations: masked tokens pass value and advantage on (not whitened)."""
    following, running, reversed_advantages = 0.0 * values[:, 0], 0.0 * values[:, 0], []
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = mask[:, t] * (delta + gamma * lam * running) + (1 - mask[:, t]) * running
        following = mask[:, t] * values[:, t] + (1 - mask[:, t]) * following
        reversed_advantages.append(running)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values
