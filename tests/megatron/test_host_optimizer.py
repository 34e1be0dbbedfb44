"""An optimizer with a part on the host has the same results as an optimizer on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megappo.megatron  # noqa: F401 - prepares torch for machines without CUDA
from megappo.megatron.optimizer import optimization
from megappo.megatron.optimizer.host_optimizer import PartlyOnHost
from megappo.megatron.optimizer.optimization import add_to_main_grad, clip_gradients

SIZES = (30, 50, 20)


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, generator=generator, requires_grad=True) for n in SIZES]


def adam(mains: list[Tensor]) -> Any:
    groups = [{"params": mains[:2], "weight_decay": 0.1}, {"params": mains[2:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6)


def storages(mains: list[Tensor]) -> set[int]:
    return {main.untyped_storage()._cdata for main in mains}


@pytest.mark.parametrize(("fraction", "on_host"), [(0.01, {50}), (0.5, {50}), (0.51, {50, 30}), (1.0, {50, 30, 20})])
def test_largest_parts_are_updated_on_the_host(fraction: float, on_host: set[int]) -> None:
    mine, truth = weights(), weights()
    partly, plain = PartlyOnHost(adam(mine), fraction, storages(mine)), adam(truth)
    for step in range(4):
        rate = 1e-2 / (step + 1)
        for optimizer in (partly, plain):
            for group in optimizer.param_groups:
                group["lr"] = rate  # Megatron's schedule sets the rate here
        for a, b in zip(mine, truth, strict=True):
            a.grad = torch.sin(a.detach() + step)
            b.grad = torch.sin(b.detach() + step)
        partly.step()
        plain.step()
        assert all(main.grad is not None for main in mine)
    for a, b in zip(mine, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        where, known_as = partly.whereabouts(a)
        assert (known_as is not a) == (len(a) in on_host) == (len(partly.state[a]) == 0)
        torch.testing.assert_close(where.state[known_as]["exp_avg"], plain.state[b]["exp_avg"], rtol=1e-5, atol=1e-7)
        assert torch.equal(known_as.detach(), a.detach())


def test_main_weights_are_on_the_device_temporarily() -> None:
    """The weights are main weights of a bfloat16 model. Weights that the device updates stay on the device."""
    mains = weights()
    partly = PartlyOnHost(adam(mains), 0.5, set())
    assert [main.untyped_storage().nbytes() for main in mains] == [4 * 30, 0, 4 * 20]
    for main in mains:
        main.grad = torch.ones(main.shape)
    partly.step()
    assert [main.untyped_storage().nbytes() for main in mains] == [4 * n for n in SIZES]
    assert torch.equal(mains[1].detach(), partly.whereabouts(mains[1])[1].detach())
    partly.release()
    assert [main.untyped_storage().nbytes() for main in mains] == [4 * 30, 0, 4 * 20]


def test_tied_embedding_uses_the_host_on_both_stages() -> None:
    mains = weights()
    mains[2].shared = True  # type: ignore[attr-defined]
    partly = PartlyOnHost(adam(mains), 0.05, storages(mains))
    assert [partly.whereabouts(main)[1] is main for main in mains] == [True, True, False]


def test_rank_without_parameters_can_step() -> None:
    """A distributed optimizer can assign no parameters to a rank."""
    PartlyOnHost(adam([torch.zeros(0, requires_grad=True)]), 0.5, set()).step()


@pytest.mark.parametrize(
    ("added", "has_other_uses", "adds"), [(False, False, True), (True, True, True), (True, False, False)]
)
def test_gradients_of_microbatches_are_accumulated(
    monkeypatch: pytest.MonkeyPatch, added: bool, has_other_uses: bool, adds: bool
) -> None:
    """The accumulation is bit-exact and restarts for each step from zeros. If the output layer has already added a
    gradient, Megatron drops the placeholder. Other gradients of a tied embedding are added."""
    monkeypatch.setattr(optimization, "PIECE", 7)
    generator = torch.Generator().manual_seed(3)
    parameter: Any = torch.nn.Parameter(torch.zeros(4, 5, dtype=torch.bfloat16))
    by_head = torch.randn(4, 5, generator=generator) if added else torch.zeros(4, 5)
    if has_other_uses:
        parameter.zero_out_wgrad = True
    parameter.register_post_accumulate_grad_hook(add_to_main_grad)
    for _ in range(2):
        parameter.main_grad, parameter.grad_added_to_main_grad = by_head.clone(), added
        parameter.has_zero_main_grad = True
        expected = by_head.clone()
        for _ in range(3):
            gradient = torch.randn(5, 4, generator=generator).bfloat16().T
            (parameter * gradient).sum().backward()
            expected += gradient if adds else 0
            assert torch.equal(parameter.main_grad, expected)
            assert (parameter.grad is None) is adds
            parameter.grad = None


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_above_the_norm_are_clipped(fused: bool) -> None:
    """The clipping is compared with a float64 reference. Only one of three steps is clipped, and the scale of AdamW
    does not affect later steps."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(6, 7, generator=generator)
    main, by_hand = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.double())
    optimizer = torch.optim.AdamW([main], lr=0.01, fused=fused)
    reference = torch.optim.AdamW([by_hand], lr=0.01)
    settings = SimpleNamespace(clip_grad=1.5)
    inner = SimpleNamespace(config=settings, optimizer=optimizer, get_parameters=lambda: [main])
    for size in (0.5, 20.0, 0.3):
        gradient = torch.randn(6, 7, generator=generator)
        gradient *= size / gradient.norm()
        main.grad, by_hand.grad = gradient.clone(), gradient.double() * min(1.0, 1.5 / (size + 1e-6))
        clip_gradients([inner], float(gradient.norm()))
        optimizer.step()
        reference.step()
        assert float((main - by_hand).detach().norm() / (by_hand - weight).detach().norm()) < 1e-5
