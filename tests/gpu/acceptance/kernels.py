"""The per-token kernels against float64, and their times compared with public kernels.

Shape legend: N rows, H features, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernels as suites
from benchmarks.kernel_timing import Machine
from megappo_kernels.backend import use_backend
from megappo_kernels.gae import gae
from megappo_kernels.lm_head import linear_logprob
from megappo_kernels.logits import logits_logprob
from megappo_kernels.losses import PolicyInputs
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from megappo_kernels.whiten import masked_whiten_stats
from tests.gpu.acceptance.machine import matrix_rate
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, judged, measured, skipped, within
from tests.support.oracles import algorithm
from tests.support.oracles import kernels as reference

TEMPERATURE = 0.9
VALUES = 5e-4
"""Bound of log-probabilities and entropies in nats. Logits are float32 sums of up to 30."""
GRADIENTS = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7}
"""Bound of the relative error of a gradient norm. In bfloat16, the gradient of the logits and the result are rounded.
"""
OBJECTIVE = PolicyObjective(clip_low=0.2, clip_high=0.28, entropy_coef=0.01)
Check = dict[str, float]


@dataclass(frozen=True)
class Inputs:
    """Inputs of an output layer and its loss."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    ups: Tensor
    """(2, N): upstream gradients of log-probabilities and entropies."""
    policy: PolicyInputs

    @staticmethod
    def make(n: int, h: int, v: int, dtype: torch.dtype, device: str, seed: int) -> Inputs:
        """Draw peaky logits similar to a trained model. The old log-probabilities are relative until `near` is
        called."""
        g = torch.Generator(device=device).manual_seed(seed)
        hidden = torch.randn(n, h, generator=g, device=device).to(dtype)
        weight = torch.empty(v, h, dtype=dtype, device=device)
        for part in weight.split(8192):
            part.copy_(torch.randn(part.shape, generator=g, device=device) * (6 / h**0.5))
        labels = torch.randint(0, v, (n,), generator=g, device=device)
        ups, more = torch.randn(2, n, generator=g, device=device), torch.randn(2, n, generator=g, device=device)
        mask = torch.rand(n, generator=g, device=device) < 0.8
        policy = PolicyInputs(0.4 * more[0], more[1], torch.full((n,), 1 / max(n, 1), device=device), mask)
        return Inputs(hidden.requires_grad_(), weight.requires_grad_(), labels, ups, policy)

    def near(self, logprob: Tensor) -> Inputs:
        """Return the same inputs with old log-probabilities close to `logprob`, so ratios are inside and outside the
        clip."""
        old = self.policy.old_logprob + logprob.detach().float()
        return replace(self, policy=replace(self.policy, old_logprob=old))


def truth(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies in float64, in groups of rows."""
    wide = weight.detach().double()
    parts = [
        reference.linear_logprob(h.double(), wide, y, temperature=TEMPERATURE)
        for h, y in zip(hidden.detach().split(256), labels.split(256), strict=True)
    ]
    logprob, entropy = zip(*parts, strict=True)
    return torch.cat(logprob), torch.cat(entropy)


def true_gradients(case: Inputs, up_logprob: Tensor, up_entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Compute gradients of hidden states and weight in float64, in groups of rows."""
    wide = case.weight.detach().double().requires_grad_()
    grad_weight, of_hidden = torch.zeros_like(wide), []
    rows = zip(case.hidden.detach().split(256), case.labels.split(256), up_logprob.split(256), up_entropy.split(256),
               strict=True)  # fmt: skip
    for h, y, up, up_of_entropy in rows:
        h = h.double().requires_grad_()
        logprob, entropy = reference.linear_logprob(h, wide, y, temperature=TEMPERATURE)
        total = (logprob * up).sum() + (entropy * up_of_entropy).sum()
        of_rows, of_weight = torch.autograd.grad(total, (h, wide))
        of_hidden.append(of_rows)
        grad_weight += of_weight
    return torch.cat(of_hidden), grad_weight


def norm_error(mine: Tensor, exact: Tensor) -> float:
    """Return the norm of the error divided by the norm of the truth, or 0 if both are empty or zero."""
    size, error = float(exact.norm()), float((mine.double() - exact).norm())
    return error / size if size else error


def largest_error(mine: Tensor, exact: Tensor) -> float:
    """Return the largest error of an element, or 0 without elements."""
    return float((mine.detach() - exact).abs().amax()) if mine.numel() else 0.0


def run_linear(case: Inputs) -> tuple[Tensor, ...]:
    """Run linear_logprob and its gradients."""
    logprob, entropy = linear_logprob(case.hidden, case.weight, case.labels, temperature=TEMPERATURE)
    total = (logprob * case.ups[0]).sum() + (entropy * case.ups[1]).sum()
    return (logprob, entropy, *torch.autograd.grad(total, (case.hidden, case.weight)))


def run_loss(case: Inputs) -> tuple[Tensor, ...]:
    """Run ppo_head_loss and its gradients."""
    result = ppo_head_loss(
        case.hidden, case.weight, case.labels, case.policy, objective=OBJECTIVE, temperature=TEMPERATURE
    )
    return (result.loss, *torch.autograd.grad(result.loss, (case.hidden, case.weight)))


def run_logits(case: Inputs) -> tuple[Tensor, ...]:
    """Run logits_logprob for stored logits, with an in-place gradient."""
    with torch.no_grad():
        leaf = case.hidden @ case.weight.T
    logits = leaf.requires_grad_() * 1
    del leaf
    logprob, entropy = logits_logprob(logits, case.labels, temperature=TEMPERATURE)
    total = (logprob * case.ups[0]).sum() + (entropy * case.ups[1]).sum()
    return logprob, entropy, torch.autograd.grad(total, logits)[0]


def check_linear(case: Inputs, exact: tuple[Tensor, Tensor]) -> tuple[Check, Check]:
    """Return the errors of values and of gradients."""
    logprob, entropy, *gradients = run_linear(case)
    values = {"logprob": largest_error(logprob, exact[0]), "entropy": largest_error(entropy, exact[1])}
    expected = true_gradients(case, case.ups[0].double(), case.ups[1].double())
    errors = [norm_error(g, w) for g, w in zip(gradients, expected, strict=True)]
    return values, dict(zip(("hidden gradient", "weight gradient"), errors, strict=True))


def check_loss(case: Inputs, exact: tuple[Tensor, Tensor]) -> tuple[Check, Check]:
    """Return the errors of the loss and of gradients. The truth is autograd of the exact log-probabilities."""
    loss, *gradients = run_loss(case)
    logprob, entropy = (x.clone().requires_grad_() for x in exact)
    wide: dict[str, Any] = {
        name: x.double() if x.is_floating_point() else x for name, x in case.policy.tensors().items()
    }
    settings = {"clip_low": OBJECTIVE.clip_low, "clip_high": OBJECTIVE.clip_high, "entropy_coef": 0.01}
    expected = algorithm.policy_loss(logprob=logprob, entropy=entropy, **wide, **settings).loss  # type: ignore[arg-type]
    ups = torch.autograd.grad(expected, (logprob, entropy))
    errors = [norm_error(g, w) for g, w in zip(gradients, true_gradients(case, *ups), strict=True)]
    return {"loss": abs(float(loss - expected))}, dict(zip(("hidden gradient", "weight gradient"), errors, strict=True))


def cases(place: Place) -> Iterator[tuple[int, int, int, torch.dtype]]:
    """Yield (N, H, V, dtype) with one row, no rows and many rows, and with odd and large vocabularies."""
    if place.tiny:
        shapes = [(0, 32, 131), (1, 32, 131), (9, 32, 1000)]
    else:
        shapes = [(0, 1024, 151936), (1, 1024, 151936), (8192, 256, 32001), (8192, 1024, 151936), (333, 512, 50257)]
    for dtype in (torch.bfloat16, torch.float32):
        for n, h, v in shapes:
            yield n, h, v, dtype


def exactness(place: Place) -> Iterator[Row]:
    """Check values, gradients and repetition of every kernel. On a CPU, the Triton kernels run in the interpreter."""
    backend: AbstractContextManager[None] = use_backend("triton") if place.device == "cpu" else nullcontext()
    with backend:
        for n, h, v, dtype in cases(place):
            yield from _head(place, n, h, v, dtype)
        yield from _beyond_2_31(place)
        yield from _per_token(place)


def _head(place: Place, n: int, h: int, v: int, dtype: torch.dtype) -> Iterator[Row]:
    needed = 8 * n * v * dtype.itemsize
    label = f"N={n} H={h} V={v} {str(dtype).removeprefix('torch.')}"
    if place.device == "cuda" and torch.cuda.mem_get_info()[0] < needed:
        yield skipped(label, f"needs {needed / 1e9:.0f} GB")
        return
    case = Inputs.make(n, h, v, dtype, place.device, seed=n + v)
    if not n:
        values = [*run_linear(case), *run_logits(case)]
        empty = [x for x in values if x.numel() and bool(x.any())]
        yield judged(f"no rows, {label}", not empty, "empty values, gradients of zero")
        return
    exact = truth(case.hidden, case.weight, case.labels)
    case = case.near(exact[0])
    for name, check in (("linear_logprob", check_linear), ("ppo_head_loss", check_loss)):
        errors_of, gradients = check(case, exact)
        yield within(f"{name}, {label}", errors_of, VALUES)
        yield within(f"{name} gradients, {label}", gradients, GRADIENTS[dtype])
    for name, run in (("linear_logprob", run_linear), ("ppo_head_loss", run_loss), ("logits_logprob", run_logits)):
        once, again = run(case), run(case)
        same = all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        yield judged(f"{name} twice, {label}", same, "equal bit for bit" if same else "differ")


def _beyond_2_31(place: Place) -> Iterator[Row]:
    """Check both kernels with offsets above 32 bits. The last rows are compared with float64."""
    what, n, v = "N x V beyond 2^31", 16384, 151936
    if place.device == "cpu":
        yield skipped(what, "needs a GPU, because a CPU takes minutes")
        return
    needed, free = 6 * n * v * 2, torch.cuda.mem_get_info()[0]
    if free < needed:
        yield skipped(what, f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
        return
    case = Inputs.make(n, 256, v, torch.bfloat16, place.device, seed=7)
    last = slice(n - 300, n)
    exact = truth(case.hidden[last], case.weight, case.labels[last])
    logprob, entropy, *_ = run_linear(case)
    errors = {"logprob": largest_error(logprob[last], exact[0]), "entropy": largest_error(entropy[last], exact[1])}
    yield within(f"linear_logprob, {what}", errors, VALUES)
    del logprob, entropy
    logits = case.hidden.detach() @ case.weight.detach().T
    exact = reference.logits_logprob(logits[last].double(), case.labels[last], temperature=TEMPERATURE)
    with torch.no_grad():
        outputs = logits_logprob(logits, case.labels, temperature=TEMPERATURE)
    errors = {n: largest_error(f[last], e) for n, f, e in zip(("logprob", "entropy"), outputs, exact, strict=True)}
    yield within(f"logits_logprob, {what}", errors, VALUES)


def _per_token(place: Place) -> Iterator[Row]:
    """Check GAE and whitening."""
    g = torch.Generator(device=place.device).manual_seed(3)
    b, t = (3, 17) if place.tiny else (4, 700)
    rewards, values = (torch.randn(b, t, generator=g, device=place.device) for _ in range(2))
    mask = torch.rand(b, t, generator=g, device=place.device) < 0.9
    outputs = gae(rewards, values, mask, gamma=0.99, lam=0.95)
    exact = reference.gae(rewards.double().cpu(), values.double().cpu(), mask.cpu(), gamma=0.99, lam=0.95)
    errors = {n: largest_error(f.cpu(), e) for n, f, e in zip(("advantages", "returns"), outputs, exact, strict=True)}
    yield within(f"gae, B={b} T={t}", errors, 1e-4)
    stats = masked_whiten_stats(rewards, mask).double().cpu()
    exact_stats = reference.masked_whiten_stats(rewards.double().cpu(), mask.cpu())
    yield within("masked_whiten_stats", {"statistics": norm_error(stats, exact_stats)}, 1e-6)


def times(place: Place) -> Iterator[Row]:
    """Measure the milliseconds of each provider, in units of its matrix products at the measured rate of this
    machine."""
    shapes = [(16, 128, 512)] if place.tiny else [(8192, 4096, 151936), (8192, 1024, 151936)]
    machine = Machine(place.device, 1 if place.tiny else 10)
    rate = matrix_rate(place)
    for n, h, v in shapes:
        for name, make, products in (("head", suites.head_suite, 2), ("train", suites.train_suite, 6)):
            floor = products * n * h * v / rate
            what = f"{name}, N={n} H={h} V={v}"
            yield measured(
                what, f"{products}NHV takes {1e3 * floor:.3g} ms at {rate / 1e12:.3g} TFLOP/s", seconds=floor
            )
            providers, peers = make(machine, n, h, v, torch.bfloat16)
            chosen = [p for p in providers if "torch.compile" not in p.name and "torch_compile" not in p.name]
            machine.time(chosen)
            for p in chosen:
                yield _timing(f"{what}: {p.name}", p, floor)
            for peer in peers if (n, h, v) == shapes[0] else ():
                if peer.run is None and "no entropy" not in peer.name:
                    yield skipped(f"{name}: {peer.name}", peer.why_not or "")


def _timing(what: str, provider: Any, floor: float) -> Row:
    if provider.failure is not None:
        own = provider.name.startswith("megappo")
        return judged(what, False, provider.failure) if own else skipped(what, provider.failure)
    seconds, gib = statistics.median(provider.seconds), provider.peak_bytes / 2**30
    text = f"{1e3 * seconds:.3g} ms, {seconds / floor:.2f} x the floor, {gib:.2f} GiB in addition to its inputs"
    return measured(what, text, seconds=seconds, times_floor=seconds / floor, peak_bytes=provider.peak_bytes)
