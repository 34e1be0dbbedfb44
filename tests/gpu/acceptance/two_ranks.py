"""One of two processes on one device; see two_processes.py.

Usage (with the variables of torchrun): python -m tests.gpu.acceptance.two_ranks DEVICE tiny|whole FOUND.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.runtime.ranks.exchange import exchange, make_routes
from megappo_kernels.lm_head import linear_logprob
from megappo_kernels.ppo_head import ppo_head_loss
from tests.gpu.acceptance.kernels import OBJECTIVE, TEMPERATURE, Inputs, norm_error, run_loss, truth


def content(i: int) -> Tensor:
    """Return a tensor that depends only on its id. Some tensors are empty."""
    return torch.randn(i % 5, 3, generator=torch.Generator().manual_seed(i))


def exchange_errors(device: torch.device) -> int:
    """Return the number of tensors that are missing, unexpected or changed."""
    rank = dist.get_rank()
    sources = {i: i % 2 for i in range(40)}
    destinations = {i: {0, 1} if i % 3 else {1 - i % 2} for i in sources}
    sizes = {i: content(i).numel() for i in sources}
    mine = {i: content(i) for i, source in sources.items() if source == rank}
    received = exchange(mine, make_routes(sources, destinations, own=rank), sizes, dtype=torch.float32, device=device)
    expected = {i for i in sources if rank in destinations[i]}
    return len(expected ^ received.keys()) + sum(not torch.equal(t, content(i).flatten()) for i, t in received.items())


def head_errors(device: str, tiny: bool) -> dict[str, float]:
    """Compare the output layer with a split vocabulary with the whole output layer."""
    n, h, v = (9, 32, 130) if tiny else (2048, 1024, 151936)
    whole = Inputs.make(n, h, v, torch.float32, device, seed=3)
    exact = truth(whole.hidden, whole.weight, whole.labels)
    whole = whole.near(exact[0])
    rows = slice(dist.get_rank() * v // 2, (dist.get_rank() + 1) * v // 2)
    part = Inputs(whole.hidden.detach().clone().requires_grad_(), whole.weight.detach()[rows].clone().requires_grad_(),
                  whole.labels, whole.ups, whole.policy)  # fmt: skip
    where: dict[str, Any] = {"tp_group": dist.group.WORLD, "temperature": TEMPERATURE}
    logprob, entropy = linear_logprob(part.hidden, part.weight, part.labels, **where)
    loss = ppo_head_loss(part.hidden, part.weight, part.labels, part.policy, objective=OBJECTIVE, **where).loss
    gradients = torch.autograd.grad(loss, (part.hidden, part.weight))
    expected_loss, *expected_gradients = run_loss(whole)
    return {
        "logprob": float((logprob - exact[0]).detach().abs().max()),
        "entropy": float((entropy - exact[1]).detach().abs().max()),
        "loss": float((loss - expected_loss).detach().abs()),
        "hidden gradient": norm_error(gradients[0], expected_gradients[0].double()),
        "weight gradient": norm_error(gradients[1], expected_gradients[1][rows].double()),
    }


def main() -> None:
    """Run both checks on this rank. Rank 0 writes the maximum of both ranks."""
    device, tiny, out = sys.argv[1], sys.argv[2] == "tiny", Path(sys.argv[3])
    dist.init_process_group("gloo")
    errors = {"exchange": float(exchange_errors(torch.device(device))), **head_errors(device, tiny)}
    names = sorted(errors)
    worst = torch.tensor([errors[name] for name in names], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(dict(zip(names, worst.tolist(), strict=True))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
