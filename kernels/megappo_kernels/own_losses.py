"""Custom policy losses: functions of per-token numbers, differentiated by autograd.

A function receives the following keyword arguments, if it has parameters with these names. All arrays are (N,), with
one number for each valid token. The sequences of a pack follow each other:

    logprob, entropy     of the policy, in nats; differentiable
    old_logprob          of the policy before the updates
    log_ratio            logprob - old_logprob, clamped to +-20 with zero slope outside
    advantages
    ref_logprob          of the reference policy; None without a reference
    sequence_mean        a function from (N,) numbers to their means over the tokens of each token's sequence, (N,)

The function returns the loss of each token. Alternatively, it returns a pair: this loss, and a dictionary of
additional (N,) numbers, whose means over tokens are reported. Weights, importance weights, entropy bonus and KL to
the reference are applied as in `objectives.policy_loss`.

A parameter `sequence_mean` declares that slopes depend on whole sequences. The output layer then computes all
log-probabilities before any gradient. If the logits do not fit into one chunk, they are computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo_kernels.objectives import LOG_RATIO_LIMIT, OFFERED, PolicyObjective, inputs_of, taken_by
from megappo_kernels.sequences import mean_over
from megappo_kernels.surrogates import Surrogate

_OF_BANDS = ("masked_below", "masked_above", "band_position", "token_weight")
"""Metrics that custom losses do not report."""


def own_slopes(
    objective: PolicyObjective, inputs: Mapping[str, Tensor], context_group: dist.ProcessGroup | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Return slopes by name in the shape of the given numbers, metrics of the valid tokens, and a mask of these
    tokens.

    Args:
        context_group: ranks with other tokens of the same sequences. All ranks must call the function, with equal
            sequence numbers.
    """
    mask = inputs["mask"]
    numbers = {name: inputs[name][mask] for name in inputs_of(objective.formula) if name in inputs}
    sequences_N = inputs["sequences"][mask] if "sequences" in inputs else None
    counts_N = torch.ones_like(numbers["logprob"], dtype=torch.bool)
    if not len(counts_N):  # without tokens, the function is called to list its metrics
        numbers = {name: x.new_zeros(1) for name, x in numbers.items()}
        sequences_N, counts_N = torch.full_like(numbers["logprob"], -1, dtype=torch.int64), mask.new_zeros(1)
    loss_N, slopes, extra = _differentiated(objective, numbers, mean_over(sequences_N, context_group))
    nothing = torch.zeros_like(loss_N)
    constant = Surrogate(loss_N, *[nothing] * (len(Surrogate._fields) - 1))
    settings = objective.settings()._replace(policy_loss=lambda *_: constant)
    others, metrics = objective.formula(settings, **numbers)
    whole = {
        name: torch.zeros_like(inputs[name]).masked_scatter_(mask, own + other)
        for name, own, other in zip(objective.trained, slopes, others, strict=True)
    }
    known = {name: x for name, x in metrics._asdict().items() if name not in _OF_BANDS}
    return whole, known | extra, counts_N


def _differentiated(
    objective: PolicyObjective, numbers: Mapping[str, Tensor], sequence_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the loss of the function, the slopes of its weighted sum, and its additional metrics."""
    assert callable(objective.policy_loss)
    with torch.enable_grad():
        logprob, entropy = (numbers[name].detach().requires_grad_() for name in objective.trained)
        offered: dict[str, Any] = {
            **{name: numbers.get(name) for name in OFFERED},
            "logprob": logprob,
            "entropy": entropy,
            "log_ratio": (logprob - numbers["old_logprob"]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT),
            "sequence_mean": sequence_mean,
        }
        returned = objective.policy_loss(**{name: offered[name] for name in taken_by(objective.policy_loss, OFFERED)})
        loss_N, extra = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        _check(loss_N, extra, logprob)
        weights = numbers["weights"] * numbers.get("importance_weights", 1.0)
        slopes = torch.autograd.grad((weights * loss_N).sum(), (logprob, entropy), materialize_grads=True)
    return loss_N.detach(), slopes, {name: x.detach() for name, x in extra.items()}


def _check(loss_N: Any, extra: Any, logprob_N: Tensor) -> None:
    """Raise ValueError if the results do not have the form of a policy loss."""
    if not isinstance(loss_N, Tensor) or loss_N.shape != logprob_N.shape:
        shown = f"shape {tuple(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
        raise ValueError(f"the policy loss returned {shown}, must be a number per token, {tuple(logprob_N.shape)}")
    if not loss_N.requires_grad:
        raise ValueError("the policy loss does not depend on the policy; use logprob, log_ratio or entropy")
    if not isinstance(extra, Mapping) or any(
        not isinstance(x, Tensor) or x.shape != logprob_N.shape for x in extra.values()
    ):
        raise ValueError(f"the policy loss reports metrics that are not tensors of shape {tuple(logprob_N.shape)}")
