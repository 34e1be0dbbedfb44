"""Compare the kernels of the output layer with a split vocabulary with the whole vocabulary in float64.

Usage (under torchrun): kernels_worker.py CASE.json FOUND.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo_kernels.backend import use_backend
from megappo_kernels.lm_head import linear_logprob
from megappo_kernels.logits import logits_logprob
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from tests.support.kernels import Head, Rounding, head, policy_inputs, relative
from tests.support.oracles import kernels as reference

# (vocabulary, padding to a multiple of the ranks): even split, padding on the last rank, ranks with only padding.
VOCABULARIES = {"even": (1100, 0), "padded": (1101, 3), "empty rank": (70, 130)}


def options(kind: str, vocab: int) -> dict[str, Any]:
    """Return the scaling options. Logits with an offset have no soft cap, because a soft cap would saturate all of
    them."""
    return {"temperature": 0.7, "softcap": None if kind.startswith("offset") else 20.0, "valid_vocab": vocab}


class Collectives:
    """Counter of the collectives of the group."""

    def __init__(self) -> None:
        self.gathers = self.reductions = 0
        self._gather, self._reduce = dist.all_gather, dist.all_reduce

    def __enter__(self) -> Collectives:
        def gather(*args: Any, **kwargs: Any) -> Any:
            self.gathers += 1
            return self._gather(*args, **kwargs)

        def reduce(*args: Any, **kwargs: Any) -> Any:
            self.reductions += 1
            return self._reduce(*args, **kwargs)

        dist.all_gather, dist.all_reduce = gather, reduce
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_gather, dist.all_reduce = self._gather, self._reduce


def shard(case: Head) -> tuple[Head, slice]:
    """Return the rows of the weight on this rank, as separate leaves."""
    size = len(case.weight) // dist.get_world_size()
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    hidden, weight = case.hidden.detach().clone(), case.weight.detach()[mine].clone()
    return Head(hidden.requires_grad_(), weight.requires_grad_(), case.labels), mine


def errors(got: list[Tensor], expected: list[Tensor]) -> float:
    return max(relative(g, w) if w.norm() > 0 else float(g.abs().max()) for g, w in zip(got, expected, strict=True))


def gates(case: Head, scaling: dict[str, Any]) -> tuple[float, float]:
    """Return the error bounds (of log-probabilities, of gradients) for these inputs."""
    gate = Rounding.of(case, **scaling).worst
    return gate, 2.0**-8 if case.hidden.dtype == torch.bfloat16 else max(1e-5, gate)


def check_linear(case: Head, exact: Head, scaling: dict[str, Any], *, sequence_parallel: bool) -> dict[str, float]:
    """Check linear_logprob, with one gather in forward and one reduction in backward, unless the caller reduces."""
    up = torch.randn(2, len(case.labels), generator=torch.Generator().manual_seed(7))
    part, mine = shard(case)
    where: dict[str, Any] = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence_parallel}
    with Collectives() as counted:
        logprob, entropy = linear_logprob(part.hidden, part.weight, part.labels, **where, **scaling)
        (logprob * up[0] + entropy * up[1]).sum().backward()
    assert (counted.gathers, counted.reductions) == (1, 0 if sequence_parallel else 1)
    true_logprob, true_entropy = reference.linear_logprob(exact.hidden, exact.weight, exact.labels, **scaling)
    grads = list(torch.autograd.grad((true_logprob * up[0] + true_entropy * up[1]).sum(), (exact.hidden, exact.weight)))
    if sequence_parallel:
        grads[0] = partial_gradient(exact, up, scaling, mine)
    assert (logprob <= 0).all()
    gate, gradient_gate = gates(case, scaling)
    return {
        "logprob": float((logprob - true_logprob).detach().abs().max()) / gate,
        "entropy": float((entropy - true_entropy).detach().abs().max()) / gate,
        "gradient": errors(part.gradients(), [grads[0], grads[1][mine]]) / gradient_gate,
    }


def partial_gradient(exact: Head, up: Tensor, scaling: dict[str, Any], mine: slice) -> Tensor:
    """Return the contribution of the vocabulary of this rank to the gradient of the hidden states."""
    logits = (exact.hidden.detach() @ exact.weight.detach().T).requires_grad_()
    logprob, entropy = reference.logits_logprob(logits, exact.labels, **scaling)
    (grad,) = torch.autograd.grad((logprob * up[0] + entropy * up[1]).sum(), logits)
    return grad[:, mine] @ exact.weight.detach()[mine]


def check_logits(case: Head, exact: Head, scaling: dict[str, Any]) -> dict[str, float]:
    """Check logits_logprob in float32."""
    part, mine = shard(case)
    logits = (part.hidden.detach().float() @ part.weight.detach().float().T).requires_grad_()
    whole = (exact.hidden.detach() @ exact.weight.detach().T).requires_grad_()
    logprob, entropy = logits_logprob(logits, part.labels, tp_group=dist.group.WORLD, **scaling)
    (logprob.sum() + 0.3 * entropy.sum()).backward()
    true_logprob, true_entropy = reference.logits_logprob(whole, exact.labels, **scaling)
    (true_logprob.sum() + 0.3 * true_entropy.sum()).backward()
    assert logits.grad is not None and whole.grad is not None
    gate = Rounding.of(case, **scaling).worst
    return {
        "logprob": float((logprob - true_logprob).detach().abs().max()) / gate,
        "gradient": errors([logits.grad], [whole.grad[:, mine]]) / gate,
    }


def check_loss(case: Head, exact: Head, scaling: dict[str, Any]) -> dict[str, float]:
    """Check ppo_head_loss with main_grad on every shard and equal chunks on all ranks."""
    part, mine = shard(case)
    part.weight.main_grad = torch.zeros(part.weight.shape)  # type: ignore[attr-defined]
    true_logprob, true_entropy = reference.linear_logprob(exact.hidden, exact.weight, exact.labels, **scaling)
    settings: dict[str, Any] = {"entropy_coef": 0.01, "kl_coef": 0.1, "dual_clip": 3.0}
    inputs = policy_inputs(true_logprob.float(), seed=4)
    where: dict[str, Any] = {"tp_group": dist.group.WORLD, "accumulate_main_grad": True}
    out = ppo_head_loss(
        part.hidden, part.weight, part.labels, inputs, objective=PolicyObjective(**settings), **where, **scaling
    )
    out.loss.backward()
    wide: dict[str, Any] = {k: v.double() if v.is_floating_point() else v for k, v in inputs.tensors().items()}
    truth = reference.policy_loss(logprob=true_logprob, entropy=true_entropy, **wide, **settings)
    grads = torch.autograd.grad(truth, (exact.hidden, exact.weight))
    assert part.hidden.grad is not None
    gate, gradient_gate = gates(case, scaling)
    # The gradient of a bfloat16 weight is a product of rounded gradients of logits, and is rounded again. If one row
    # has a large part of the norm, both errors can be as large as 2^-8 with the same sign.
    of_weight = 2 * 2.0**-8 if case.weight.dtype == torch.bfloat16 else gradient_gate
    return {
        "loss": float((out.loss - truth).detach().abs()) / gate,
        "gradient": errors([part.hidden.grad], [grads[0]]) / gradient_gate,
        "weight": errors([part.weight.main_grad], [grads[1][mine]]) / of_weight,  # type: ignore[attr-defined]
    }


def check_all(kind: str, name: str, errors_of: dict[str, dict[str, float]]) -> None:
    """Check every kernel for a kind of logits and a vocabulary. Errors are in units of their bounds."""
    vocab, padding = VOCABULARIES[name]
    scaling = options(kind, vocab)
    for dtype in (torch.float32, torch.bfloat16):
        case = head(kind, dtype, rows=37, features=24, vocab=vocab, padding=padding)
        exact, label = case.exact(), f"{kind}, {name}, {dtype}"
        for sp in (False, True):
            errors_of[f"linear, {label}, sp={sp}"] = check_linear(case, exact, scaling, sequence_parallel=sp)
        errors_of[f"loss, {label}"] = check_loss(case, exact, scaling)
        errors_of[f"logits, {label}"] = check_logits(case, exact, scaling)
    case = head(kind, torch.float32, rows=5, features=24, vocab=vocab, padding=padding)
    with use_backend("triton"):
        errors_of[f"triton, {kind}, {name}"] = check_linear(case, case.exact(), scaling, sequence_parallel=False)
        errors_of[f"triton loss, {kind}, {name}"] = check_loss(case, case.exact(), scaling)


def main() -> None:
    dist.init_process_group("gloo")
    errors_of: dict[str, dict[str, float]] = {}
    for name in VOCABULARIES:
        check_all(json.loads(Path(sys.argv[1]).read_text())["kind"], name, errors_of)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, errors_of)
    if dist.get_rank() == 0:
        worst = {k: {m: max(g[k][m] for g in gathered) for m in errors_of[k]} for k in errors_of}
        Path(sys.argv[2]).write_text(json.dumps(worst))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
