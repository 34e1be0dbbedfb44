"""Peers of the kernel benchmark on this CPU match float64 torch, and other peers report a reason.

Peers of missing packages are skipped. The minimum is a comparison of torch and megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from benchmarks import kernel_peers
from benchmarks.kernel_peers import Peer
from tests.support.oracles import kernels as reference

pytestmark = pytest.mark.waits

T, H, V = 12, 16, 40
TEMPERATURE = 0.7
CLIP = (0.2, 0.28)

# Most peers round the logits to bfloat16, which changes logits near 8 by up to 0.03. Entropies near 3 in bfloat16
# change by 0.01. Gradients that are accumulated in bfloat16 change by some tenths of a percent.
ATOL = {torch.float32: 2e-5, torch.bfloat16: 8e-2}
RELATIVE_GRADIENT = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=g).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(V, H, generator=g)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), generator=g)


def runnable(peers: list[Peer], dtype: torch.dtype) -> list[tuple[str, Callable]]:
    """Return the peers that run on the CPU. In bfloat16, compiled peers are excluded to keep the test short."""
    on_cpu = [p for p in peers if p.run is not None and "cpu" in p.devices]
    short = [p for p in on_cpu if dtype == torch.float32 or ("compile" not in p.name and "fused_vocab" not in p.name)]
    return [(p.name, p.run) for p in short if p.run is not None]


def relative(mine: Tensor | None, truth: Tensor | None) -> float:
    assert mine is not None and truth is not None
    return float((mine.double() - truth).norm() / truth.norm())


@pytest.fixture
def groups() -> Iterator[None]:
    yield
    kernel_peers.close_groups()


@pytest.mark.parametrize("list_peers", ["head_forward_peers", "head_training_peers", "logits_peers", "gae_peers"])
def test_peers_run_or_report_a_reason(list_peers: str) -> None:
    peers = getattr(kernel_peers, list_peers)()
    assert len({p.name for p in peers}) == len(peers)
    for peer in peers:
        assert (peer.run is None) == bool(peer.why_not), peer
        assert peer.version and peer.devices, peer
        assert torch.cuda.is_available() or "cpu" in peer.devices or peer.run is None, peer
    assert any(peer.run for peer in peers)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_forward(dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(dtype)
    true_logprob, true_entropy = reference.linear_logprob(
        hidden.double(), weight.double(), labels, temperature=TEMPERATURE
    )
    for name, run in runnable(kernel_peers.head_forward_peers(), dtype):
        logprob, entropy = run(hidden, weight, labels, temperature=TEMPERATURE)
        assert logprob.shape == (T,) and logprob.dtype == torch.float32, name
        assert (logprob - true_logprob).abs().max() <= ATOL[dtype], name
        if entropy is not None:
            assert (entropy - true_entropy).abs().max() <= ATOL[dtype], name


@pytest.mark.slow
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_training(dtype: torch.dtype, entropy_coef: float) -> None:
    hidden, weight, labels = inputs(dtype)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logprob, entropy = reference.linear_logprob(*exact, labels, temperature=TEMPERATURE)
    g = torch.Generator().manual_seed(1)
    old = (logprob.detach() + 0.4 * torch.randn(T, generator=g)).float()  # some ratios are clipped
    advantages, weights = torch.randn(T, generator=g), torch.rand(T, generator=g)
    true_loss = kernel_peers.ppo_loss(logprob, entropy, old, advantages, weights, *CLIP, entropy_coef)
    true_loss.backward()
    for name, run in runnable(kernel_peers.head_training_peers(), dtype):
        hidden.grad = weight.grad = None
        try:
            loss = run(hidden, weight, labels, old, advantages, weights, TEMPERATURE, *CLIP, entropy_coef)
        except ValueError as error:
            assert entropy_coef and "no entropy" in str(error), name
            continue
        loss.backward()
        assert abs(loss.double() - true_loss) <= 5 * ATOL[dtype], name
        for mine, truth in zip((hidden, weight), exact, strict=True):
            assert relative(mine.grad, truth.grad) <= RELATIVE_GRADIENT[dtype], name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(dtype: torch.dtype, groups: None) -> None:
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(T, V, generator=g)).to(dtype).requires_grad_()
    labels, upstream = torch.randint(0, V, (T,), generator=g), torch.randn(T, generator=g)
    exact, before = logits.detach().double().requires_grad_(), logits.detach().clone()
    true_logprob = torch.log_softmax(exact, -1).gather(-1, labels[:, None]).squeeze(-1)
    (true_logprob * upstream).sum().backward()
    for name, run in runnable(kernel_peers.logits_peers(), dtype):
        logits.grad = None
        logprob = run(logits, labels)
        (logprob * upstream).sum().backward()
        assert torch.equal(logits.detach(), before), name
        assert (logprob - true_logprob).abs().max() <= ATOL[dtype], name
        # Megatron's fused operator rounds the gradient to bfloat16 for all dtypes of logits.
        rounded = torch.bfloat16 if "fused" in name else dtype
        assert relative(logits.grad, exact.grad) <= RELATIVE_GRADIENT[rounded], name


def textbook(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Return the advantages of one sample without masked tokens: sum over k of (gamma lam)^k delta_{t+k}."""
    delta = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    lag = torch.arange(len(delta))[None, :] - torch.arange(len(delta))[:, None]
    return torch.where(lag >= 0, (gamma * lam) ** lag.clamp(min=0).double(), 0.0) @ delta


@pytest.mark.parametrize("columns", [1, 128, 150])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae(columns: int, gamma: float, lam: float) -> None:
    g = torch.Generator().manual_seed(columns)
    rewards, values = torch.randn(2, 3, columns, generator=g)
    holes = (torch.rand(3, columns, generator=g) < 0.7).float()
    holes[:, 0] = 1.0
    for peer in kernel_peers.gae_peers():
        if peer.run is None:
            continue
        # All peers agree without masked tokens. The two families use the mask differently.
        mask = torch.ones_like(holes) if "Ignores the mask" in peer.notes else holes
        advantages, returns = peer.run(rewards, values, mask, gamma, lam)
        valid = mask.bool()
        truth = torch.cat(
            [textbook(rewards[b, valid[b]].double(), values[b, valid[b]].double(), gamma, lam) for b in range(3)]
        )
        torch.testing.assert_close(returns[valid], (truth + values[valid]).float(), rtol=1e-4, atol=1e-4)
        if "whitened" in peer.notes:
            truth = (truth - truth.mean()) * torch.rsqrt(truth.var() + 1e-8)
        torch.testing.assert_close(advantages[valid], truth.float(), rtol=1e-4, atol=1e-4)
