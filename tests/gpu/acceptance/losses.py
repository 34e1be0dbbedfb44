"""Every policy loss in the output layer: values and gradients against float64, and times in units of `clip`.

Shape legend: N rows, H features, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks.kernel_timing import Machine, Provider
from megappo_kernels.backend import use_backend
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from megappo_kernels.surrogates import POLICY_LOSSES
from tests.gpu.acceptance.kernels import (
    GRADIENTS,
    TEMPERATURE,
    VALUES,
    Inputs,
    largest_error,
    norm_error,
    true_gradients,
    truth,
)
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, judged, measured, within
from tests.support.oracles import algorithm

Exact: TypeAlias = tuple[Tensor, Tensor]
"""Log-probabilities and entropies, or their gradients."""
_SEQUENCE = 37
"""Tokens of each sequence. The last sequence may have fewer."""
_PLAIN = "clip"
_NEAR_NATS = 1e-4
"""Tokens with a jump of the slope within this distance are excluded, because rounding determines the side of the
edge."""
_JUMP = 0.02
"""Minimum jump of a slope, in units of advantage times weight. Without an edge, the slope changes by at most a tenth
of this value."""


def every_policy_loss(place: Place) -> Iterator[Row]:
    """Check the fused loss in bfloat16 and float32, with log-ratios on both sides of every band."""
    backend: AbstractContextManager[None] = use_backend("triton") if place.device == "cpu" else nullcontext()
    n, h, v = (40, 32, 300) if place.tiny else (2048, 512, 32001)
    with backend:
        for dtype in (torch.bfloat16, torch.float32):
            case = Inputs.make(n, h, v, dtype, place.device, seed=11)
            exact = truth(case.hidden, case.weight, case.labels)
            case = _with_sequences(case.near(exact[0]))
            for name in POLICY_LOSSES:
                yield from _against_float64(name, case, exact, dtype)
    yield from _times(place)


def _with_sequences(case: Inputs) -> Inputs:
    numbers = torch.arange(len(case.labels), device=case.labels.device) // _SEQUENCE
    return replace(case, policy=replace(case.policy, sequences=numbers))


def _run(case: Inputs, name: str) -> tuple[Tensor, ...]:
    objective = PolicyObjective(policy_loss=name, entropy_coef=0.01)
    result = ppo_head_loss(
        case.hidden, case.weight, case.labels, case.policy, objective=objective, temperature=TEMPERATURE
    )
    return (result.loss, *torch.autograd.grad(result.loss, (case.hidden, case.weight)))


def _slopes(name: str, case: Inputs, exact: Exact, shift: float = 0.0) -> tuple[Tensor, Exact]:
    """Return the loss in float64 on the CPU and its derivatives with respect to log-probabilities and entropies.
    `shift` is added to the old log-probabilities."""
    logprob, entropy = (x.clone().cpu().requires_grad_() for x in exact)
    wide: dict[str, Any] = {
        n: x.double().cpu() if x.is_floating_point() else x.cpu() for n, x in case.policy.tensors().items()
    }
    wide["old_logprob"] = wide["old_logprob"] + shift
    arguments = {"policy_loss": name, "entropy_coef": 0.01, **wide}
    loss = algorithm.policy_loss(logprob=logprob, entropy=entropy, **arguments).loss
    of_logprob, of_entropy = torch.autograd.grad(loss, (logprob, entropy))
    return loss.detach(), (of_logprob, of_entropy)


def _away_from_edges(name: str, case: Inputs, exact: Exact) -> Inputs:
    """Return the inputs without tokens at an edge."""
    below, above = (_slopes(name, case, exact, shift)[1][0] for shift in (-_NEAR_NATS, _NEAR_NATS))
    size = (case.policy.weights * case.policy.advantages).abs().double().cpu()
    near = ((below - above).abs() > _JUMP * size).to(case.policy.mask.device)
    return replace(case, policy=replace(case.policy, mask=case.policy.mask & ~near))


def _against_float64(name: str, case: Inputs, exact: Exact, dtype: torch.dtype) -> Iterator[Row]:
    case = _away_from_edges(name, case, exact)
    expected, ups = _slopes(name, case, exact)
    loss, *gradients = _run(case, name)
    label = f"{name}, {str(dtype).removeprefix('torch.')}"
    yield within(label, {"loss": largest_error(loss.cpu(), expected)}, VALUES)
    exact_gradients = true_gradients(case, *(x.to(case.hidden.device) for x in ups))
    errors = [norm_error(g, w) for g, w in zip(gradients, exact_gradients, strict=True)]
    named = dict(zip(("hidden gradient", "weight gradient"), errors, strict=True))
    yield within(f"{label}: gradients", named, GRADIENTS[dtype])
    again = _run(case, name)
    same = all(torch.equal(a, b) for a, b in zip((loss, *gradients), again, strict=True))
    yield judged(f"{label}: twice", same, "equal bit for bit" if same else "differ")


def _times(place: Place) -> Iterator[Row]:
    """Measure interleaved times with gradients."""
    n, h, v = (40, 32, 300) if place.tiny else (8192, 1024, 151936)
    machine = Machine(place.device, 1 if place.tiny else 10)
    case = _with_sequences(Inputs.make(n, h, v, torch.bfloat16, place.device, seed=12))

    def prepare(_round: int, name: str) -> Callable[[], Any]:
        return lambda: _run(case, name)

    providers = [Provider(name, partial(prepare, name=name)) for name in POLICY_LOSSES]
    machine.time(providers)
    seconds = {p.name: statistics.median(p.seconds) for p in providers if p.failure is None}
    for p in providers:
        what = f"{p.name}: time, N={n} H={h} V={v} bfloat16"
        if p.failure is not None:
            yield judged(what, False, p.failure)
            continue
        times = seconds[p.name] / seconds[_PLAIN]
        text = f"{1e3 * seconds[p.name]:.4g} ms, {times:.3f} x {_PLAIN}"
        yield measured(what, text, seconds=seconds[p.name], times_clip=times)
