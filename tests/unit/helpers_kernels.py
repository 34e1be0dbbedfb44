"""Inputs and gates that the kernel tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo_kernels import PolicyInputs, reference

KINDS = ("random", "peaky", "offset+150", "offset-150")


@dataclass
class Head:
    """An output layer's inputs, leaves that require gradients."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor

    def exact(self) -> Head:
        """The same in float64, leaves of their own."""
        leaves = [x.detach().double().requires_grad_() for x in (self.hidden, self.weight)]
        return Head(*leaves, self.labels)

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


def logprob_gate(case: Head, exact_logprob: Tensor, **options: object) -> float:
    """1e-5, or what plain float32 arithmetic loses on the same inputs: logits near 500 are 3e-5 apart in float32."""
    plain = Head(case.hidden.detach().float(), case.weight.detach().float(), case.labels)
    logprob, _ = reference.linear_logprob(plain.hidden, plain.weight, plain.labels, **options)  # type: ignore[arg-type]
    return 1e-5 + 2 * float((logprob - exact_logprob.detach()).abs().max())


def policy_inputs(logprob: Tensor, seed: int, *, wide: bool = False) -> PolicyInputs:
    """Ragged masks, garbage where masked, ratios inside and outside of the clip; of the type of `logprob`."""
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
    garbage = torch.tensor([float("nan"), float("inf"), -1e30])
    for x in fields.values():
        x[~mask] = garbage[torch.randint(0, 3, (int((~mask).sum()),), generator=g)].to(dtype)
    return PolicyInputs(mask=mask, **fields)


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
