"""Token losses with gradients, computed in one pass without synchronising with the host.

The weights of tokens are the only normalisation. Every aggregation of losses is a set of weights, so losses of
microbatches and ranks are summed. All arguments must have the same shape; any shape is allowed.
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
    """Inputs of the policy loss for each token. All tensors have the same shape."""

    old_logprob: Tensor
    """Log-probabilities under the policy before the updates, in nats."""
    advantages: Tensor
    weights: Tensor
    """Weights of the tokens, the only normalisation of the loss."""
    mask: Tensor
    """bool; masked positions (False) have no effect and may contain any value."""
    ref_logprob: Tensor | None = None
    importance_weights: Tensor | None = None
    """Constant factors on the surrogate loss."""
    nll_weights: Tensor | None = None
    """Weights of the negative log-likelihood, including normalisation. 0 for tokens that are not imitated, and for
    tokens with `weights` 0."""
    sequences: Tensor | None = None
    """int64 sequence number of each token, for objectives that use sequences."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: x for name, x in named.items() if x is not None}

    def of_rows(self, rows: slice | Tensor) -> PolicyInputs:
        """Return the inputs of some of the tokens (1-d tensors only)."""
        return PolicyInputs(**{name: x[rows] for name, x in self.tensors().items()})


@dataclass(frozen=True)
class Loss:
    """Differentiable scalar loss with its metrics."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    """Report as described in `metrics`: detached float64 scalars, including the `loss` itself."""


@dataclass(frozen=True)
class Evaluation:
    """Values of an objective for some tokens."""

    slopes: Mapping[str, Tensor]
    """Derivatives of the loss with respect to the trained numbers, by name. 0 for masked tokens."""
    report: dict[str, Tensor]


def evaluate(
    objective: Objective, tensors: Mapping[str, Tensor], context_group: dist.ProcessGroup | None = None
) -> Evaluation:
    """Evaluate an objective on tokens.

    Args:
        tensors: numbers of the tokens by name, and `mask`.
        context_group: ranks with other tokens of the same sequences.
    """
    if isinstance(objective, PolicyObjective) and callable(objective.policy_loss):
        slopes, metrics, mask = own_slopes(objective, tensors, context_group)
        return Evaluation(slopes, measure(metrics, mask))
    if isinstance(objective, PolicyObjective) and objective.sees_sequences:
        tensors = {**tensors, "sequence_log_ratio": sequence_log_ratio(tensors, context_group)}
    numbers = {
        name: tensors[name] if must else tensors.get(name) for name, must in inputs_of(objective.formula).items()
    }
    first, mask = tensors[objective.trained[0]], tensors["mask"]
    if runs_triton(first):
        from megappo_kernels.gpu.objectives import launch_objective

        slope_list, parts = launch_objective(objective, numbers, mask)
        report = combine(parts)
    else:
        cleaned = {name: x if x is None else x.masked_fill(~mask, 0.0) for name, x in numbers.items()}
        slope_list, named = objective.formula(objective.settings(), **cleaned)
        report = measure(named._asdict(), mask)
    return Evaluation(dict(zip(objective.trained, slope_list, strict=True)), report)


def whole_loss(report: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the loss terms in a report."""
    return torch.stack([x for name, x in report.items() if metric_kind(name) == "term"]).sum()


def ppo_token_loss(
    *,
    logprob: Tensor,
    inputs: PolicyInputs,
    entropy: Tensor | None = None,
    objective: PolicyObjective | None = None,
) -> Loss:
    """Compute the policy loss of tokens, differentiable in `logprob` and `entropy`.

    Args:
        logprob: log-probabilities of the sampled tokens under the policy, in nats. float32 or float64, any shape.
        inputs: the constants of each token, of the same shape.
        entropy: entropy of the distribution at each token, in nats. Default: zeros.
        objective: default: PPO-clip with 0.2.

    Raises ValueError if shapes differ, and TypeError if the mask is not bool.
    """
    entropy = entropy if entropy is not None else torch.zeros_like(logprob)
    tensors = {"logprob": logprob, "entropy": entropy, **inputs.tensors()}
    return _differentiable(objective or PolicyObjective(), tensors)


def ppo_value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    mask: Tensor,
    value_clip: float | None = None,
) -> Loss:
    """Compute the value loss of tokens, differentiable in `values` (float32 or float64, any shape).

    `mask` is bool; masked positions (False) have no effect. Without `value_clip`, values are not clipped and
    `old_values` are not used. Raises ValueError if shapes differ, and TypeError if the mask is not bool.
    """
    tensors = {"values": values, "old_values": old_values, "returns": returns, "weights": weights, "mask": mask}
    return _differentiable(ValueObjective(value_clip), tensors)


def _differentiable(objective: Objective, tensors: Mapping[str, Tensor]) -> Loss:
    trained = [tensors[name] for name in objective.trained]
    check_inputs(tensors, trained[0].shape)
    with torch.no_grad():
        evaluation = evaluate(objective, tensors)
        value = whole_loss(evaluation.report).to(trained[0].dtype)
    loss = _WithSlopes.apply(value, tuple(evaluation.slopes[name] for name in objective.trained), *trained)
    return Loss(loss, {**evaluation.report, "loss": value.double()})


class _WithSlopes(torch.autograd.Function):
    """Loss with gradients that were computed in forward."""

    @staticmethod
    def forward(ctx: Context, value: Tensor, slopes: tuple[Tensor, ...], *trained: Tensor) -> Tensor:
        ctx.save_for_backward(*slopes)
        return value.clone()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grads[0] * slope for slope in ctx.saved_tensors)


def check_inputs(tensors: Mapping[str, Tensor], shape: torch.Size) -> None:
    """Raise ValueError if a tensor has a different shape, and TypeError if the mask is not bool."""
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {tuple(shape)}")
    if tensors["mask"].dtype != torch.bool:
        raise TypeError(f"mask has dtype {tensors['mask'].dtype}, must be torch.bool; pass mask.bool()")
