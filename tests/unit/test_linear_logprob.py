"""linear_logprob against its float64 reference, on one rank; tests/distributed has the sharded one."""

from __future__ import annotations

import pytest
import torch

from megappo_kernels import linear_logprob, reference


@pytest.mark.parametrize("vocab", [7, 131, 1100])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("offset", [0.0, 150.0, -150.0])
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_values_and_gradients(
    vocab: int, temperature: float, offset: float, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megappo_kernels.lm_head._CHUNK_BYTES", chunk_bytes)
    g = torch.Generator().manual_seed(vocab)
    hidden, weight = torch.randn(9, 16, generator=g), torch.randn(vocab + 5, 16, generator=g)
    hidden[:, 0], weight[:, 0] = 1.0, offset  # shifts every logit
    labels = torch.randint(0, vocab, (9,), generator=g)
    up = torch.randn(2, 9, generator=g)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    logprob, entropy = linear_logprob(*leaves, labels, temperature=temperature, valid_vocab=vocab)
    (logprob * up[0] + entropy * up[1]).sum().backward()
    exact = [x.double().requires_grad_() for x in (hidden, weight[:vocab])]
    true_logprob, true_entropy = reference.linear_logprob(*exact, labels, temperature)
    (true_logprob * up[0] + true_entropy * up[1]).sum().backward()
    tolerance = 1e-5 if offset == 0 else 2e-4  # float32 logits near 150 are 1e-5 apart themselves
    assert (logprob <= 0).all()
    torch.testing.assert_close(logprob.double(), true_logprob, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy.double(), true_entropy, rtol=tolerance, atol=tolerance)
    for mine, truth in zip(leaves, exact, strict=True):
        assert mine.grad is not None and truth.grad is not None
        n = len(truth.grad)
        assert (mine.grad[:n] - truth.grad).norm() <= 20 * tolerance * truth.grad.norm()
        assert (mine.grad[n:] == 0).all()


def test_gradcheck() -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 6, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 10, 3, 3])
    torch.autograd.gradcheck(lambda h, w: linear_logprob(h, w, labels, temperature=0.7), (hidden, weight))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(5, 8, generator=g), torch.randn(37, 8, generator=g)
    labels = torch.arange(5)
    hidden[4] = float("nan")
    logprob, _ = linear_logprob(hidden, weight, labels)
    clean, _ = linear_logprob(hidden[:4], weight, labels[:4])
    assert torch.equal(logprob[:4], clean)
