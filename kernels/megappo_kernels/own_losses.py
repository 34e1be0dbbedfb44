"""A policy loss of your own: a function of the numbers of tokens, differentiated by autograd.

It is called with those of these that it has parameters for, by keyword; all are (N,), one number for each token that
counts, of several sequences end to end:

    logprob, entropy     of the policy, in nats; differentiable
    old_logprob          of the policy before the updates
    log_ratio            logprob - old_logprob within +-20, beyond which it has no slope
    advantages
    ref_logprob          of the reference policy; None without one
    sequence_mean        a function: the mean of (N,) numbers over the tokens of each token's sequence, (N,)

and returns the loss of each token, or a pair of it and a dictionary of further numbers (N,), whose means over tokens
are reported. Weights, importance weights, entropy bonus and KL to the reference are those of `objectives.policy_loss`.

A parameter `sequence_mean` declares that slopes depend on whole sequences. The output layer then finishes all
log-probabilities before any gradient, and where they do not fit into one chunk computes the logits twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo_kernels.objectives import LOG_RATIO_LIMIT, OFFERED, PolicyObjective, Surrogate, inputs_of, taken_by


def own_slopes(
    objective: PolicyObjective, given: Mapping[str, Tensor], context_group: dist.ProcessGroup | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Slopes by name in the shape of what was given; metrics of the tokens that count, and a mask of those.

    `context_group`: ranks that have other tokens of the same sequences, numbered alike; all call it.
    """
    mask = given["mask"]
    numbers = {name: given[name][mask] for name in inputs_of(objective.formula) if name in given}
    sequences_N = given["sequences"][mask] if "sequences" in given else None
    counts_N = torch.ones_like(numbers["logprob"], dtype=torch.bool)
    if not len(counts_N):  # a token that does not count shows what there is to report
        numbers = {name: x.new_zeros(1) for name, x in numbers.items()}
        sequences_N, counts_N = torch.full_like(numbers["logprob"], -1, dtype=torch.int64), mask.new_zeros(1)
    loss_N, slopes, extra = _differentiated(objective, numbers, _mean_over(sequences_N, context_group))
    nothing = torch.zeros_like(loss_N)
    constant = Surrogate(loss_N, nothing, nothing, nothing)
    settings = objective.settings()._replace(policy_loss=lambda *_: constant)
    others, metrics = objective.formula(settings, **numbers)
    whole = {
        name: torch.zeros_like(given[name]).masked_scatter_(mask, own + other)
        for name, own, other in zip(objective.trained, slopes, others, strict=True)
    }
    return whole, metrics._asdict() | extra, counts_N


def _differentiated(
    objective: PolicyObjective, numbers: Mapping[str, Tensor], sequence_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor]]:
    """The function's loss, the slopes of its weighted sum, and what else it reports."""
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
        said = objective.policy_loss(**{name: offered[name] for name in taken_by(objective.policy_loss, OFFERED)})
        loss_N, extra = said if isinstance(said, tuple) and len(said) == 2 else (said, {})
        _check(loss_N, extra, logprob)
        weights = numbers["weights"] * numbers.get("importance_weights", 1.0)
        slopes = torch.autograd.grad((weights * loss_N).sum(), (logprob, entropy), materialize_grads=True)
    return loss_N.detach(), slopes, {name: x.detach() for name, x in extra.items()}


def _mean_over(sequences_N: Tensor | None, group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """`sequence_mean`; as products of matrices, whose sums have the same order every time."""

    def mean(x_N: Tensor) -> Tensor:
        if sequences_N is None:
            raise ValueError("the policy loss wants means over sequences; say which tokens are whose: inputs.sequences")
        if group is None:
            _, index_N = torch.unique(sequences_N, return_inverse=True)
        else:  # a number of its own for the token that does not count, as other ranks have those of sequence 0
            index_N = sequences_N + 1
        member_NS = torch.nn.functional.one_hot(index_N, _largest(index_N, group) + 1).to(x_N.dtype)
        sums_S: Tensor = _SumOver.apply(x_N @ member_NS, group)
        counts_S: Tensor = _SumOver.apply(member_NS.sum(0), group)
        return member_NS @ (sums_S / counts_S.clamp(min=1))

    return mean


def _largest(index_N: Tensor, group: dist.ProcessGroup | None) -> int:
    largest = index_N.amax()
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return int(largest)


class _SumOver(torch.autograd.Function):
    """The sum over ranks, which each of them uses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    x = x.clone()
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def _check(loss_N: Any, extra: Any, logprob_N: Tensor) -> None:
    """Raise ValueError for what is not what a policy loss returns."""
    if not isinstance(loss_N, Tensor) or loss_N.shape != logprob_N.shape:
        shown = f"shape {tuple(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
        raise ValueError(f"the policy loss returned {shown}, must be a number per token, {tuple(logprob_N.shape)}")
    if not loss_N.requires_grad:
        raise ValueError("the policy loss does not depend on the policy; use logprob, log_ratio or entropy")
    if not isinstance(extra, Mapping) or any(
        not isinstance(x, Tensor) or x.shape != logprob_N.shape for x in extra.values()
    ):
        raise ValueError(f"the policy loss reports what is not named numbers of shape {tuple(logprob_N.shape)}")
