#!/usr/bin/env python3
"""Compare speed, memory and accuracy of the kernels with public alternatives and the physical limit.

Usage: python -m benchmarks.kernels [--device cuda|cpu] [--suites head train logits gae tokens] [--tokens N ...]
           [--hidden H] [--vocab V ...] [--dtype bfloat16|float32] [--repeat R] [--tiny] [--save FILE.md]

All providers of a suite run in one process and alternate in each round. Inputs change between rounds. The tables
show the median over rounds, and the 20th and 80th percentile. On CUDA, the L2 cache is flushed before each call.
Logits are peaked, like those of a trained model.

"floor" is the time of a provider divided by the measured time of the bare matrix products, or of a copy of the same
bytes. A provider that omits no work cannot be below 1.0. Memory is the peak without the inputs. Errors are relative
to float64, on a smaller problem of the same kind: the largest absolute error of log-probabilities or values, and the
larger relative norm error of the two gradients. Compilation and autotuning are not timed. Providers that cannot run
are listed with the reason.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import kernel_peers
from benchmarks.kernel_peers import Peer
from benchmarks.kernel_timing import HEADINGS, Machine, Provider, markdown, rows_of
from megappo_kernels.gae import gae
from megappo_kernels.lm_head import linear_logprob
from megappo_kernels.logits import logits_logprob
from megappo_kernels.losses import PolicyInputs, ppo_token_loss, ppo_value_loss
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from megappo_kernels.whiten import masked_whiten_stats
from tests.support.oracles import algorithm
from tests.support.oracles import kernels as reference

GAMMA, LAM, TEMPERATURE = 0.99, 0.95, 0.9
CLIP = (0.2, 0.28)


# -- The output head --


@dataclass
class HeadCase:
    """Inputs of the head in two sets, which are used in turn."""

    hidden: list[Tensor]
    weight: Tensor
    labels: list[Tensor]
    old: Tensor
    advantages: Tensor
    weights: Tensor

    @staticmethod
    def make(n: int, h: int, v: int, dtype: torch.dtype, device: torch.device) -> HeadCase:
        g = torch.Generator(device=device).manual_seed(0)
        make = partial(torch.randn, generator=g, device=device)
        weight = torch.empty(v, h, dtype=dtype, device=device)
        for part in weight.split(8192):  # standard deviation of the logits: 6
            part.copy_(make(part.shape) * (6 / h**0.5))
        labels = [torch.randint(0, v, (n,), generator=g, device=device) for _ in range(2)]
        hidden = [make(n, h).to(dtype).requires_grad_() for _ in range(2)]
        weights = torch.full((n,), 1 / n, device=device)
        return HeadCase(hidden, weight.requires_grad_(), labels, -8 - make(n).abs(), make(n), weights)

    def of(self, round_number: int) -> tuple[Tensor, Tensor, Tensor]:
        for leaf in (*self.hidden, self.weight):
            leaf.grad = None
        return self.hidden[round_number % 2], self.weight, self.labels[round_number % 2]

    def inputs(self) -> PolicyInputs:
        mask = torch.ones_like(self.advantages, dtype=torch.bool)
        return PolicyInputs(self.old, self.advantages, self.weights, mask)


Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
Training = Callable[[HeadCase, Tensor, Tensor, Tensor], Tensor]


def head_suite(machine: Machine, n: int, h: int, v: int, dtype: torch.dtype) -> tuple[list[Provider], list[Peer]]:
    """Return providers of log-probabilities without gradients."""
    case, small = (HeadCase.make(*shape, dtype, machine.device) for shape in ((n, h, v), (128, 256, min(v, 8192))))
    out = torch.empty(n, v, dtype=dtype, device=machine.device)

    def gemm(round_number: int) -> Callable[[], Any]:
        hidden, weight, _ = case.of(round_number)
        return no_grad(lambda: torch.mm(hidden, weight.T, out=out))

    def own(entropy: bool, exact: bool) -> Forward:
        return partial(linear_logprob, temperature=TEMPERATURE, entropy=entropy, exact_logits=exact)

    forwards: dict[str, Forward] = {
        "megappo linear_logprob": own(True, True),
        "megappo linear_logprob, no entropy": own(False, True),
    }
    if dtype == torch.bfloat16 and not machine.is_cuda:
        forwards["megappo linear_logprob, rounded logits"] = own(True, False)
        forwards["megappo linear_logprob, rounded logits, no entropy"] = own(False, False)
    peers = kernel_peers.head_forward_peers()
    for peer in _runnable(peers, machine):
        forwards[peer.name] = partial(_peer_forward, peer.run)
    providers = [Provider("bare GEMM, 2NHV", gemm, is_floor=True)]
    for name, forward in forwards.items():

        def prepare(round_number: int, forward: Forward = forward) -> Callable[[], Any]:
            arguments = case.of(round_number)
            return no_grad(lambda: forward(*arguments))

        providers.append(Provider(name, prepare, partial(_forward_error, forward, small)))
    return providers, peers


def _peer_forward(run: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    return run(hidden, weight, labels, TEMPERATURE)


def no_grad(call: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a call in torch.no_grad."""

    def run() -> Any:
        with torch.no_grad():
            return call()

    return run


def _forward_error(forward: Forward, case: HeadCase) -> str:
    hidden, weight, labels = (x.detach() for x in case.of(0))
    with torch.no_grad():
        logprob, _ = forward(hidden, weight, labels)
    truth, _ = reference.linear_logprob(hidden.double(), weight.double(), labels, temperature=TEMPERATURE)
    return f"{float((logprob - truth).abs().max()):.1e}"


def train_suite(machine: Machine, n: int, h: int, v: int, dtype: torch.dtype) -> tuple[list[Provider], list[Peer]]:
    """Return providers of the PPO loss with the gradients of hidden states and weight. The loss includes entropy if
    the provider supports it."""
    case, small = (HeadCase.make(*shape, dtype, machine.device) for shape in ((n, h, v), (128, 256, min(v, 8192))))
    buffers = (
        torch.empty(n, v, dtype=dtype, device=machine.device),
        torch.empty(n, h, dtype=dtype, device=machine.device),
        torch.empty(v, h, dtype=dtype, device=machine.device),
    )

    def gemms(round_number: int) -> Callable[[], Any]:
        hidden, weight, _ = (x.detach() for x in case.of(round_number))

        def run() -> None:
            torch.mm(hidden, weight.T, out=buffers[0])
            torch.mm(buffers[0], weight, out=buffers[1])
            torch.mm(buffers[0].T, hidden, out=buffers[2])

        return run

    objective = PolicyObjective(clip_low=CLIP[0], clip_high=CLIP[1], entropy_coef=0.01)

    def fused(data: HeadCase, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        options = {"objective": objective, "temperature": TEMPERATURE}
        return ppo_head_loss(hidden, weight, labels, data.inputs(), **options).loss  # type: ignore[arg-type]

    def into_main_grad(data: HeadCase, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        if not hasattr(weight, "main_grad"):
            weight.main_grad = torch.zeros(weight.shape, device=weight.device)  # type: ignore[attr-defined]
        options = {"objective": objective, "temperature": TEMPERATURE, "accumulate_main_grad": True}
        return ppo_head_loss(hidden, weight, labels, data.inputs(), **options).loss  # type: ignore[arg-type]

    def recomputed(data: HeadCase, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logprob, entropy = linear_logprob(hidden, weight, labels, temperature=TEMPERATURE)
        return ppo_token_loss(logprob=logprob, entropy=entropy, inputs=data.inputs(), objective=objective).loss

    ways: dict[str, Training] = {
        "megappo ppo_head_loss": fused,
        "megappo ppo_head_loss into main_grad": into_main_grad,
        "megappo linear_logprob + ppo_token_loss": recomputed,
    }
    peers = kernel_peers.head_training_peers()
    for peer in _runnable(peers, machine):
        ways[peer.name] = partial(_peer_training, peer.run)
    providers = [Provider("bare GEMMs, 6NHV", gemms, is_floor=True)]
    for name, way in ways.items():

        def prepare(round_number: int, way: Training = way) -> Callable[[], Any]:
            arguments = case.of(round_number)
            return lambda: way(case, *arguments).backward()

        error = None if "main_grad" in name else partial(_training_error, way, small)
        providers.append(Provider(name, prepare, error))
    return providers, peers


def _peer_training(run: Any, data: HeadCase, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    arguments = (hidden, weight, labels, data.old, data.advantages, data.weights, TEMPERATURE, *CLIP)
    try:
        return run(*arguments, 0.01)
    except ValueError:  # the peer computes no entropy
        return run(*arguments, 0.0)


def _constant(run: Callable[[], Any], _: int) -> Callable[[], Any]:
    """Return the call of a provider whose inputs do not change between rounds."""
    return run


def _training_error(way: Training, case: HeadCase) -> str:
    arguments = case.of(0)
    way(case, *arguments).backward()
    hidden, weight, labels = arguments
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logprob, entropy = reference.linear_logprob(*exact, labels, temperature=TEMPERATURE)
    wide: dict[str, Any] = {k: x.double() if x.is_floating_point() else x for k, x in case.inputs().tensors().items()}
    errors = []
    for coef in (0.01, 0.0):  # providers without entropy match the second loss: use the smaller error
        loss = reference.policy_loss(
            logprob=logprob, entropy=entropy, **wide, clip_low=CLIP[0], clip_high=CLIP[1], entropy_coef=coef
        )
        truth = torch.autograd.grad(loss, exact, retain_graph=True)
        grads = (hidden.grad, weight.grad)
        errors.append(max(float((g.double() - t).norm() / t.norm()) for g, t in zip(grads, truth, strict=True)))  # type: ignore[union-attr]
    return f"{min(errors):.1e}"


def logits_suite(machine: Machine, n: int, h: int, v: int, dtype: torch.dtype) -> tuple[list[Provider], list[Peer]]:
    """Return providers of log-probabilities from logits, with forward and backward."""
    g = torch.Generator(device=machine.device).manual_seed(0)
    leaf = (6 * torch.randn(n, v, generator=g, device=machine.device)).to(dtype).requires_grad_()
    labels = torch.randint(0, v, (n,), generator=g, device=machine.device)
    up, copy = torch.randn(n, generator=g, device=machine.device), torch.empty_like(leaf)
    peers = kernel_peers.logits_peers()
    ways: dict[str, Any] = {
        "megappo logits_logprob": lambda x, y: logits_logprob(x, y, entropy=False)[0],
        "megappo logits_logprob with entropy": lambda x, y: sum(logits_logprob(x, y)),
    }
    ways |= {peer.name: peer.run for peer in _runnable(peers, machine)}
    source = leaf.detach()
    providers = [Provider("read, and write in place", lambda _: lambda: copy.copy_(source), is_floor=True)]
    for name, way in ways.items():

        def prepare(_: int, way: Any = way) -> Callable[[], Any]:
            logits = leaf.detach().clone().requires_grad_() * 1
            return lambda: torch.autograd.grad((way(logits, labels) * up).sum(), logits)

        providers.append(Provider(name, prepare))
    return providers, peers


# -- Per token --


def gae_suite(machine: Machine, b: int, t: int) -> tuple[list[Provider], list[Peer]]:
    """Return providers of advantages for B samples of T tokens, with different lengths and masked tokens."""
    g = torch.Generator(device=machine.device).manual_seed(0)
    make = partial(torch.randn, generator=g, device=machine.device)
    rewards, values = make(b, t), make(b, t)
    mask = torch.rand(b, t, generator=g, device=machine.device) < 0.9
    weights = mask.float()
    source, target = (torch.ones(3, b, t, device=machine.device), torch.empty(3, b, t, device=machine.device))
    exact, _ = gae(rewards.double(), values.double(), mask, gamma=GAMMA, lam=LAM)
    peers = kernel_peers.gae_peers()

    def error(run: Callable[[], tuple[Tensor, Tensor]]) -> str:
        return f"{float((run()[0] - exact)[mask].abs().max()):.1e}"

    own = partial(gae, rewards, values, mask, gamma=GAMMA, lam=LAM)
    providers = [
        Provider("copy of 24 bytes a token", lambda _: lambda: target.copy_(source), is_floor=True),
        Provider("megappo gae", lambda _: own, partial(error, own)),
    ]
    for peer in _runnable(peers, machine):
        assert peer.run is not None
        run = partial(peer.run, rewards, values, weights, GAMMA, LAM)
        comparable = "Ignores the mask" not in peer.notes and "whitened" not in peer.notes
        providers.append(Provider(peer.name, partial(_constant, run), partial(error, run) if comparable else None))
    return providers, peers


def tokens_suite(machine: Machine, n: int) -> tuple[list[Provider], list[Peer]]:
    """Return providers of policy loss, value loss and whitening statistics of n tokens, with gradients. torch is the
    alternative of each."""
    g = torch.Generator(device=machine.device).manual_seed(0)
    fields: dict[str, Any] = {
        name: torch.randn(n, generator=g, device=machine.device) for name in ("old_logprob", "advantages")
    }
    weights, mask = torch.rand(n, generator=g, device=machine.device) / n, torch.rand(n, device=machine.device) < 0.9
    logprob, entropy = (torch.randn(n, generator=g, device=machine.device).requires_grad_() for _ in range(2))
    inputs = PolicyInputs(weights=weights, mask=mask, **fields)
    source, target = torch.ones(4, n, device=machine.device), torch.empty(4, n, device=machine.device)
    values = {"old_values": fields["old_logprob"], "returns": fields["advantages"], "weights": weights, "mask": mask}

    def both(loss: Callable[[], Tensor], *leaves: Tensor) -> Callable[[int], Callable[[], Any]]:
        return lambda _: lambda: torch.autograd.grad(loss(), leaves)

    objective = PolicyObjective(entropy_coef=0.01)
    own = partial(ppo_token_loss, logprob=logprob, entropy=entropy, inputs=inputs, objective=objective)
    plain = partial(
        algorithm.policy_loss, logprob=logprob, entropy=entropy, weights=weights, mask=mask, entropy_coef=0.01, **fields
    )
    stats = partial(masked_whiten_stats, fields["advantages"], mask)
    return [
        Provider("copy of 32 bytes a token", lambda _: lambda: target.copy_(source), is_floor=True),
        Provider("megappo ppo_token_loss", both(lambda: own().loss, logprob, entropy)),
        Provider("torch policy loss", both(lambda: plain().loss, logprob, entropy)),
        Provider(
            "megappo ppo_value_loss",
            both(lambda: ppo_value_loss(values=logprob, value_clip=0.2, **values).loss, logprob),
        ),
        Provider(
            "torch value loss",
            both(lambda: algorithm.value_loss(values=logprob, value_clip=0.2, **values).loss, logprob),
        ),
        Provider("megappo masked_whiten_stats", lambda _: stats),
        Provider("torch whiten stats", lambda _: partial(reference.masked_whiten_stats, fields["advantages"], mask)),
    ], []


# -- Report --


def _runnable(peers: list[Peer], machine: Machine) -> list[Peer]:
    return [p for p in peers if p.run is not None and machine.device.type in p.devices]


def suites(arguments: argparse.Namespace, machine: Machine) -> Iterator[tuple[str, list[Provider], list[Peer]]]:
    """Yield (title, providers, peers) of each suite. The inputs of a suite are freed before the next suite."""
    dtype, h = getattr(torch, arguments.dtype), arguments.hidden
    for name, make in (("head", head_suite), ("train", train_suite), ("logits", logits_suite)):
        for v in arguments.vocab if name in arguments.suites else ():
            for n in arguments.tokens:
                torch.compiler.reset()
                yield f"{name}: N={n} H={h} V={v} {arguments.dtype}", *make(machine, n, h, v, dtype)
    if "gae" in arguments.suites:
        for b, t in ((2, 64),) if arguments.tiny else ((8, 1024), (16, 32768)):
            yield f"gae: B={b} T={t}", *gae_suite(machine, b, t)
    if "tokens" in arguments.suites:
        n = 1000 if arguments.tiny else 2**20
        yield f"tokens: n={n}", *tokens_suite(machine, n)


def main() -> None:
    """Run the suites and print their tables."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    names = ["head", "train", "logits", "gae", "tokens"]
    parser.add_argument("--suites", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192, 32768] if cuda else [512])
    parser.add_argument("--hidden", type=int, default=4096 if cuda else 2048)
    parser.add_argument("--vocab", nargs="+", type=int, default=[32768, 131072, 151936] if cuda else [151936])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeat", type=int, default=30 if cuda else 5)
    parser.add_argument("--tiny", action="store_true", help="small shapes for a functional test")
    parser.add_argument("--save", type=Path, help="write the tables as Markdown")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.tokens, arguments.hidden, arguments.vocab, arguments.repeat = [32], 128, [1024], 1
    machine = Machine(arguments.device, arguments.repeat)
    what = (
        torch.cuda.get_device_name() if machine.is_cuda else f"{torch.get_num_threads()} threads, {platform.machine()}"
    )
    head = f"{datetime.now(UTC):%Y-%m-%d}, {what}, torch {torch.__version__}, `{' '.join(sys.argv)}`"
    texts, console = [head, ""], Console()
    console.print(head)
    for title, providers, peers in suites(arguments, machine):
        machine.time(providers)
        rows = rows_of(providers)
        table = Table(*HEADINGS, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        texts.append(markdown(title, rows, peers))
        if arguments.save:
            arguments.save.write_text("\n".join(texts))
    kernel_peers.close_groups()


if __name__ == "__main__":
    main()
