"""Policy losses of the user's: a function of the numbers of tokens, differentiated by autograd.

The function is called by keyword with those of the following that it has parameters for. All are (N,), one number for
each token that counts, of several sequences end to end:

    logprob, entropy     of the policy, in nats; differentiable
    old_logprob          of the policy before the updates
    log_ratio            logprob - old_logprob within +-20, beyond which it has no slope
    advantages
    ref_logprob          of the reference policy; None without one
    sequence_mean        a function: the mean of (N,) numbers over the tokens of each token's sequence, (N,)

It returns the loss of each token, or a pair of it and a dictionary of further numbers (N,), whose means over tokens are
reported. Weights, importance weights, entropy bonus and KL to the reference are those of `objectives.policy_loss`.

A parameter `sequence_mean` declares that slopes depend on whole sequences. The output layer then computes all
log-probabilities before any gradient, and computes the logits twice where they do not fit into one chunk.
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
"""Metrics that only the function itself could know."""


def own_slopes(
    objective: PolicyObjective, given: Mapping[str, Tensor], context_group: dist.ProcessGroup | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Slopes by name in the shape of the given numbers; metrics of the tokens that count, and a mask of those.

    `context_group`: ranks that have other tokens of the same sequences, numbered alike; all of them call this.
    """
    mask = given["mask"]
    numbers = {name: given[name][mask] for name in inputs_of(objective.formula) if name in given}
    sequences_N = given["sequences"][mask] if "sequences" in given else None
    counts_N = torch.ones_like(numbers["logprob"], dtype=torch.bool)
    if not len(counts_N):  # without tokens the function still shows which metrics it reports
        numbers = {name: x.new_zeros(1) for name, x in numbers.items()}
        sequences_N, counts_N = torch.full_like(numbers["logprob"], -1, dtype=torch.int64), mask.new_zeros(1)
    loss_N, slopes, extra = _differentiated(objective, numbers, mean_over(sequences_N, context_group))
    nothing = torch.zeros_like(loss_N)
    constant = Surrogate(loss_N, *[nothing] * (len(Surrogate._fields) - 1))
    settings = objective.settings()._replace(policy_loss=lambda *_: constant)
    others, metrics = objective.formula(settings, **numbers)
    whole = {
        name: torch.zeros_like(given[name]).masked_scatter_(mask, own + other)
        for name, own, other in zip(objective.trained, slopes, others, strict=True)
    }
    known = {name: x for name, x in metrics._asdict().items() if name not in _OF_BANDS}
    return whole, known | extra, counts_N


def _differentiated(
    objective: PolicyObjective, numbers: Mapping[str, Tensor], sequence_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor]]:
    """The function's loss, the slopes of its weighted sum, and its further metrics."""
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


def _check(loss_N: Any, extra: Any, logprob_N: Tensor) -> None:
    """Raise ValueError for results that are not those of a policy loss."""
    if not isinstance(loss_N, Tensor) or loss_N.shape != logprob_N.shape:
        shown = f"shape {tuple(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
        raise ValueError(f"the policy loss returned {shown}, must be a number per token, {tuple(logprob_N.shape)}")
    if not loss_N.requires_grad:
        raise ValueError("the policy loss does not depend on the policy; use logprob, log_ratio or entropy")
    if not isinstance(extra, Mapping) or any(
        not isinstance(x, Tensor) or x.shape != logprob_N.shape for x in extra.values()
    ):
        raise ValueError(f"the policy loss reports what is not named numbers of shape {tuple(logprob_N.shape)}")
