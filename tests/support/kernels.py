"""Inputs and error bounds that the kernel tests share."""

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
    """Inputs of an output layer, which are leaves with gradients."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor

    def exact(self) -> Head:
        """Return the same inputs in float64 as separate leaves."""
        hidden, weight = (x.detach().double().requires_grad_() for x in (self.hidden, self.weight))
        return Head(hidden, weight, self.labels)

    def gradients(self) -> list[Tensor]:
        grads = [self.hidden.grad, self.weight.grad]
        assert grads[0] is not None and grads[1] is not None
        return [g for g in grads if g is not None]


def head(kind: str, dtype: torch.dtype, *, rows: int, features: int, vocab: int, padding: int = 0) -> Head:
    """Return inputs whose logits have spread 1 (random), spread 8 with clear maxima (peaky), or values around +-150."""
    g = torch.Generator().manual_seed(rows + vocab)
    hidden = torch.randn(rows, features, generator=g)
    weight = torch.randn(vocab + padding, features, generator=g) / features**0.5
    if kind == "peaky":
        weight *= 8
    if kind.startswith("offset"):
        hidden[:, 0], weight[:, 0] = 150.0, float(kind.removeprefix("offset")) / 150
    weight[vocab:] = 100.0  # padding must not be read
    labels = torch.randint(0, vocab, (rows,), generator=g)
    labels[0], labels[-1] = 0, vocab - 1
    return Head(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels)


def relative(mine: Tensor, truth: Tensor) -> float:
    """Return the norm of the error divided by the norm of the truth."""
    return float((mine.double() - truth.double()).norm() / truth.double().norm())


UNIT = 2.0**-24
"""Largest relative error of one rounding to float32."""


@dataclass(frozen=True)
class Rounding:
    """Bounds of the float32 errors for given logits, per row, for any processor, instructions and order of sums.

    n roundings in random directions add up like sqrt(n) steps. Each step is at most UNIT times the summed value (Higham
    and Mary 2019, "A New Approach to Probabilistic Rounding Error Analysis").
    """

    logprob_T: Tensor
    entropy_T: Tensor

    @property
    def worst(self) -> float:
        """Largest bound of all rows. The value also bounds the relative error of probabilities, which determine the
        gradients of logits."""
        return float(torch.maximum(self.logprob_T, self.entropy_T).max())

    @staticmethod
    def of_logits(logits_TV: Tensor, labels_T: Tensor, inherited_TV: Tensor | float = 0.0) -> Rounding:
        """Compute the bounds from scaled logits in float64 and their inherited errors."""
        logp_TV = logits_TV.log_softmax(-1)
        p_TV = logp_TV.exp()
        # Soft cap, temperature and the shift by the maximum cause rounding errors proportional to the logits.
        error_TV = inherited_TV + 4 * UNIT * logits_TV.abs()
        # The sum over the vocabulary, and the addition of the maximum and the logarithm.
        total_T = UNIT * (logits_TV.shape[1] ** 0.5 + 2 * logits_TV.abs().amax(-1))
        label_T = error_TV.gather(1, labels_T[:, None]).squeeze(1)
        slope_TV = (
            p_TV * (logp_TV - (p_TV * logp_TV).sum(-1, keepdim=True)).abs()
        )  # derivative of the entropy with respect to the logits
        weighted_TV = slope_TV * (error_TV + UNIT * logits_TV.shape[1] ** 0.5)
        return Rounding(label_T + (p_TV * error_TV).sum(-1) + total_T, weighted_TV.sum(-1) + total_T)

    @staticmethod
    def of(case: Head, *, valid_vocab: int | None = None, **scaling: Any) -> Rounding:
        """Compute the bounds from the factors of the logits. Each logit is a sum over the features."""
        hidden, weight = case.hidden.detach().double(), case.weight.detach().double()[:valid_vocab]
        logits = reference.scaled_logits(hidden @ weight.T, **scaling)
        temperature = scaling.get("temperature", 1.0)
        products = (
            hidden.abs() @ weight.abs().T / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
        )
        return Rounding.of_logits(logits, case.labels, UNIT * hidden.shape[1] ** 0.5 * products)


def policy_inputs(logprob: Tensor, seed: int, *, wide: bool = False, imitates: bool = False) -> PolicyInputs:
    """Return inputs with ragged masks, garbage at masked positions, and ratios inside and outside the clip, in the
    dtype of `logprob`. With `imitates`, some tokens have a weight for their likelihood."""
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


def token_loss(*, logprob: Tensor, entropy: Tensor | None = None, **arguments: Any) -> Loss:
    """Call the policy loss of the product with the arguments of the oracles, which mix token tensors and settings."""
    settings = {name: arguments.pop(name) for name in PolicyObjective.__dataclass_fields__ if name in arguments}
    inputs, objective = PolicyInputs(**arguments), PolicyObjective(**settings)
    return ppo_token_loss(logprob=logprob, entropy=entropy, inputs=inputs, objective=objective)


def verl_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute the semantics that verl documents for conversations: masked tokens forward value and advantage (not
    whitened)."""
    following, running, reversed_advantages = 0.0 * values[:, 0], 0.0 * values[:, 0], []
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = mask[:, t] * (delta + gamma * lam * running) + (1 - mask[:, t]) * running
        following = mask[:, t] * values[:, t] + (1 - mask[:, t]) * following
        reversed_advantages.append(running)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values
