"""Losses of tokens with their gradients, in one pass over them and without a host synchronisation.

The weights are the only normalisation, so every aggregation is a set of per-token weights, and losses add up over
microbatches and ranks. All arguments have the same shape, whatever it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megappo_kernels.autograd import Context
from megappo_kernels.backend import runs_triton
from megappo_kernels.metrics import combine, measure
from megappo_kernels.objectives import Objective, PolicyObjective, ValueObjective, inputs_of, metric_kind
from megappo_kernels.own_losses import own_slopes
from megappo_kernels.sequences import sequence_log_ratio


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of the policy loss per token, all of one shape."""

    old_logprob: Tensor
    """Log-probabilities under the policy before the updates, nats."""
    advantages: Tensor
    weights: Tensor
    """Weights of the tokens, the only normalisation of the loss."""
    mask: Tensor
    """bool; positions that are False have no effect, whatever they hold."""
    ref_logprob: Tensor | None = None
    importance_weights: Tensor | None = None
    """Constants that multiply the surrogate."""
    nll_weights: Tensor | None = None
    """Weights of the negative log-likelihood, including its normalisation: 0 for tokens that are not imitated, and
    where `weights` are 0."""
    sequences: Tensor | None = None
    """int64: number of each token's sequence, for objectives that see sequences."""

    def tensors(self) -> dict[str, Tensor]:
        """The given tensors, by name."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: x for name, x in named.items() if x is not None}

    def of_rows(self, rows: slice | Tensor) -> PolicyInputs:
        """Inputs of some of the tokens (1-d only)."""
        return PolicyInputs(**{name: x[rows] for name, x in self.tensors().items()})


@dataclass(frozen=True)
class Loss:
    """A differentiable scalar, and its metrics."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    """Report as described in `metrics`, detached float64 scalars, including the `loss` itself."""


@dataclass(frozen=True)
class Evaluation:
    """An objective evaluated on some tokens."""

    slopes: Mapping[str, Tensor]
    """Derivatives of the loss with respect to the trained numbers, by name; 0 where masked."""
    report: dict[str, Tensor]


def evaluate(
    objective: Objective, given: Mapping[str, Tensor], context_group: dist.ProcessGroup | None = None
) -> Evaluation:
    """Evaluate an objective on tokens. `given`: their numbers by name, and `mask`.

    `context_group`: ranks that have other tokens of the same sequences.
    """
    if isinstance(objective, PolicyObjective) and callable(objective.policy_loss):
        slopes, metrics, mask = own_slopes(objective, given, context_group)
        return Evaluation(slopes, measure(metrics, mask))
    if isinstance(objective, PolicyObjective) and objective.sees_sequences:
        given = {**given, "sequence_log_ratio": sequence_log_ratio(given, context_group)}
    numbers = {name: given[name] if must else given.get(name) for name, must in inputs_of(objective.formula).items()}
    first, mask = given[objective.trained[0]], given["mask"]
    if runs_triton(first):
        from megappo_kernels.gpu.objectives import launch_objective

        found, parts = launch_objective(objective, numbers, mask)
        report = combine(parts)
    else:
        cleaned = {name: x if x is None else x.masked_fill(~mask, 0.0) for name, x in numbers.items()}
        found, named = objective.formula(objective.settings(), **cleaned)
        report = measure(named._asdict(), mask)
    return Evaluation(dict(zip(objective.trained, found, strict=True)), report)


def whole_loss(report: Mapping[str, Tensor]) -> Tensor:
    """Sum of the terms in a report."""
    return torch.stack([x for name, x in report.items() if metric_kind(name) == "term"]).sum()


def ppo_token_loss(
    *,
    logprob: Tensor,
    inputs: PolicyInputs,
    entropy: Tensor | None = None,
    objective: PolicyObjective | None = None,
) -> Loss:
    """The policy's objective of tokens, differentiable in `logprob` and `entropy`.

    Args:
        logprob: of the sampled tokens under the policy, nats, float32 or float64; any shape.
        inputs: the constants of each token, of the same shape.
        entropy: of the distribution at each token, nats; default: zeros.
        objective: default: PPO-clip with 0.2.

    Raises ValueError where shapes differ, TypeError where the mask is not bool.
    """
    entropy = entropy if entropy is not None else torch.zeros_like(logprob)
    given = {"logprob": logprob, "entropy": entropy, **inputs.tensors()}
    return _differentiable(objective or PolicyObjective(), given)


def ppo_value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    mask: Tensor,
    value_clip: float | None = None,
) -> Loss:
    """The critic's objective of tokens, differentiable in `values`, which are float32 or float64 of any shape.

    `mask` is bool; positions that are False have no effect. Without `value_clip` nothing is clipped, and `old_values`
    are not used. Raises ValueError where shapes differ, TypeError where the mask is not bool.
    """
    given = {"values": values, "old_values": old_values, "returns": returns, "weights": weights, "mask": mask}
    return _differentiable(ValueObjective(value_clip), given)


def _differentiable(objective: Objective, given: Mapping[str, Tensor]) -> Loss:
    trained = [given[name] for name in objective.trained]
    check_inputs(given, trained[0].shape)
    with torch.no_grad():
        found = evaluate(objective, given)
        value = whole_loss(found.report).to(trained[0].dtype)
    loss = _WithSlopes.apply(value, tuple(found.slopes[name] for name in objective.trained), *trained)
    return Loss(loss, {**found.report, "loss": value.double()})


class _WithSlopes(torch.autograd.Function):
    """A loss whose gradients were computed in forward."""

    @staticmethod
    def forward(ctx: Context, value: Tensor, slopes: tuple[Tensor, ...], *trained: Tensor) -> Tensor:
        ctx.save_for_backward(*slopes)
        return value.clone()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grads[0] * slope for slope in ctx.saved_tensors)


def check_inputs(given: Mapping[str, Tensor], shape: torch.Size) -> None:
    """Raise ValueError where a tensor has another shape, TypeError where the mask is not bool."""
    for name, tensor in given.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {tuple(shape)}")
    if given["mask"].dtype != torch.bool:
        raise TypeError(f"mask has dtype {given['mask'].dtype}, must be torch.bool; pass mask.bool()")
