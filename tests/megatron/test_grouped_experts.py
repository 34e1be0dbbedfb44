"""Experts as grouped products and the dispatch of tokens, compared with a loop in float64."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.functional import grouped_mm, silu

from megappo.megatron.layers import parallel
from megappo.megatron.layers.experts import GroupedExperts
from megappo.megatron.layers.parallel import expert_products
from megappo.megatron.layers.routing import TokenDispatcher, by_own_expert
from megappo_kernels.clamped import ClampedSwiGLU
from megappo_kernels.gemm import takes_grouped

RAGGED = [3, 0, 7, 1, 0, 12]
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}
"""Bounds of the relative error norm by the dtype of the computation."""


BOUNDED, UNBOUNDED = ClampedSwiGLU(alpha=1.3, limit=0.5), ClampedSwiGLU(alpha=1.3, limit=50.0)


def configuration(
    dtype: torch.dtype, hidden: int, ffn: int, n_experts: int, chosen: int = 2, **changes: Any
) -> TransformerConfig:
    usual = {"activation_func": silu, "add_bias_linear": False}
    return TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=hidden, ffn_hidden_size=ffn, moe_ffn_hidden_size=ffn,
        num_moe_experts=n_experts, moe_router_topk=chosen, gated_linear_unit=True, params_dtype=dtype,
        use_cpu_initialization=True, **(usual | changes),
    )  # fmt: skip


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def router_weights(dtype: torch.dtype, *shape: int) -> Tensor:
    """Draw router weights in float32 or a wider dtype."""
    return drawn(*shape, dtype=torch.promote_types(dtype, torch.float32), seed=6).sigmoid()


def make_experts(config: TransformerConfig) -> GroupedExperts:
    assert config.num_moe_experts
    made = GroupedExperts(config.num_moe_experts, config)
    with torch.no_grad():
        for seed, weight in enumerate(made.parameters()):
            weight.copy_(drawn(*weight.shape, dtype=weight.dtype, seed=seed) * weight.shape[-1] ** -0.5)
    return made


def one(row: Tensor, of: list[Tensor], clamped: ClampedSwiGLU | None = None) -> Tensor:
    """Compute the output of one expert for a row, with bounds and biases as in gpt-oss if `clamped` is set."""
    if clamped is None:
        gate, up = (of[0] @ row).chunk(2)
        return of[1] @ (silu(gate) * up)
    gate, up = (of[0] @ row + of[2]).chunk(2)
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return of[1] @ ((up + 1) * gate * torch.sigmoid(clamped.alpha * gate)) + of[3]


def exact(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_close(dtype: torch.dtype, results: list[Any], right: list[Any]) -> None:
    for tensor, true in zip(results, right, strict=True):
        error = float((tensor.detach().double() - true.detach()).norm() / true.detach().norm())
        assert error < BOUNDS[dtype], (tuple(tensor.shape), error)


def check_against_loop(dtype: torch.dtype, hidden: int, ffn: int, clamped: ClampedSwiGLU | None = None) -> None:
    """Compare the output and all gradients of experts with many, few and no rows."""
    changes: dict[str, Any] = {} if clamped is None else {"activation_func": clamped, "add_bias_linear": True}
    layer = make_experts(configuration(dtype, hidden, ffn, len(RAGGED), **changes))
    rows = drawn(sum(RAGGED), hidden, dtype=dtype, seed=5).requires_grad_()
    weights = router_weights(dtype, len(rows)).requires_grad_()
    upstream = drawn(*rows.shape, dtype=dtype, seed=7)
    output, bias = layer(rows, torch.tensor(RAGGED), weights)
    assert bias is None
    output.backward(upstream)
    leaves = exact(rows, weights, *layer.parameters())
    numbers = torch.arange(len(RAGGED)).repeat_interleave(torch.tensor(RAGGED))
    made = [w * one(r, [p[n] for p in leaves[2:]], clamped) for r, w, n in zip(*leaves[:2], numbers, strict=True)]
    truth = torch.stack(made)
    truth.backward(upstream.double())
    grads = [leaf.grad for leaf in (rows, weights, *layer.parameters())]
    assert_close(dtype, [output, *grads], [truth, *(leaf.grad for leaf in leaves)])
    assert all(not parameter.grad[1].any() for parameter in layer.parameters())  # the second expert has no rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_equal_the_loop(dtype: torch.dtype) -> None:
    with patch.object(parallel, "grouped_mm", wraps=grouped_mm) as grouped:
        check_against_loop(dtype, 32, 24)
    assert grouped.call_count == 2


@pytest.mark.parametrize(
    ("dtype", "clamped"),
    [
        (torch.float32, BOUNDED),
        (torch.float64, BOUNDED),
        # A rounded value can cross a bound, which changes the gradient.
        (torch.bfloat16, UNBOUNDED),
    ],
)
def test_experts_with_biases_and_bounds_equal_the_loop(dtype: torch.dtype, clamped: ClampedSwiGLU) -> None:
    check_against_loop(dtype, 32, 24, clamped)
    layer = make_experts(configuration(dtype, 32, 24, 2, activation_func=clamped, add_bias_linear=True))
    names = {name for name, _ in layer.named_parameters()}
    assert names == {"weight1", "weight2", "bias1.bias", "bias2.bias"}  # Megatron recognises the last two as biases


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bounds_on_either_side(dtype: torch.dtype) -> None:
    """The gradient at a bound is 0, as in `clamp` of torch 2.14."""
    values = [-0.75, -0.5, -0.25, 0.25, 0.5, 0.75]  # exact in bfloat16
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).to(dtype).requires_grad_()
    weights = router_weights(dtype, len(pairs)).requires_grad_()
    output, upstream = BOUNDED(pairs, weights), drawn(len(pairs), 1, dtype=dtype)
    output.backward(upstream)
    wide, wide_weights = exact(pairs, weights)
    gate, up = wide.unbind(1)
    gate, up = torch.where(gate < 0.5, gate, 0.5), torch.where(up.abs() < 0.5, up, 0.5 * up.sign())
    truth = ((up + 1) * gate * torch.sigmoid(1.3 * gate) * wide_weights)[:, None]
    truth.backward(upstream.double())
    assert_close(dtype, [output, pairs.grad, weights.grad], [truth, wide.grad, wide_weights.grad])
    assert pairs.grad is not None and torch.equal(pairs.grad[:, 0] == 0, wide.detach()[:, 0] >= 0.5)
    assert torch.equal(pairs.grad[:, 1] == 0, wide.detach()[:, 1].abs() >= 0.5)
    with pytest.raises(ValueError, match="3 columns are no gate and up side by side"):
        BOUNDED(torch.zeros(2, 3), torch.ones(2))


@pytest.mark.parametrize(
    ("dtype", "hidden", "ffn"), [(torch.float64, 32, 24), (torch.bfloat16, 32, 18), (torch.float32, 30, 24)]
)
def test_unsupported_shapes_use_separate_products(dtype: torch.dtype, hidden: int, ffn: int) -> None:
    """Separate products are used for dtypes other than bfloat16 and float32, and for rows that are no multiple of 16
    bytes."""
    assert not takes_grouped(dtype, hidden, ffn)
    with patch.object(parallel, "grouped_mm", side_effect=AssertionError):
        check_against_loop(dtype, hidden, ffn)
    rows, weight = (drawn(*shape, dtype=dtype).requires_grad_() for shape in ((5, hidden), (1, ffn, hidden)))
    with pytest.raises(RuntimeError, match=r"16 bytes|Expected mat_a to be Float32, BFloat16"):
        product = grouped_mm(rows, weight.transpose(1, 2), offs=torch.tensor([5], dtype=torch.int32))
        product.backward(torch.ones(5, ffn, dtype=dtype))


@pytest.mark.parametrize("changes", [{}, {"activation_func": BOUNDED, "add_bias_linear": True}])
def test_experts_without_rows_have_zero_gradients(changes: dict[str, Any]) -> None:
    layer = make_experts(configuration(torch.float32, 32, 24, 3, **changes))
    rows = torch.empty(0, 32, requires_grad=True)
    output, _ = layer(rows, torch.zeros(3, dtype=torch.int64), torch.empty(0))
    output.sum().backward()
    assert output.shape == (0, 32) and rows.grad is not None
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())


@pytest.fixture
def alone(world_of_one: None) -> ProcessGroupCollection:
    world = dist.group.WORLD
    return ProcessGroupCollection(ep=world, expt_tp=world, tp_ep=world)


def routing(n_tokens: int, n_experts: int, chosen: int) -> Tensor:
    """Return the chosen experts (T, E) as bool. The last expert has no tokens."""
    scores = torch.rand(n_tokens, n_experts - 1, generator=torch.Generator().manual_seed(8))
    return torch.zeros(n_tokens, n_experts, dtype=torch.bool).scatter_(1, scores.topk(chosen).indices, True)


def routed(dispatcher: TokenDispatcher, layer: GroupedExperts, tokens: Tensor, chosen: Tensor, probs: Tensor) -> Tensor:
    """Call the dispatcher in the order of the Megatron layer."""
    rows, weights = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(tokens, chosen, probs))
    output, _ = layer(*(dispatcher.dispatch_postprocess(rows, weights)[i] for i in (0, 1, 2)))
    return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(output)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_output_is_the_weighted_sum_of_experts(alone: ProcessGroupCollection, dtype: torch.dtype) -> None:
    config = configuration(dtype, 32, 24, 6, chosen=3)
    layer, dispatcher = make_experts(config), TokenDispatcher(config, alone)
    tokens = drawn(11, 1, 32, dtype=dtype, seed=5).requires_grad_()
    chosen = routing(11, 6, 3)
    probs = (router_weights(dtype, 11, 6) * chosen).requires_grad_()
    upstream = drawn(11, 1, 32, dtype=dtype, seed=7)
    output = routed(dispatcher, layer, tokens, chosen, probs)
    output.backward(upstream)
    leaves = exact(tokens, probs, *layer.parameters())
    weighted = [
        [leaves[1][t, e] * one(leaves[0][t, 0], [p[e] for p in leaves[2:]]) for e in chosen[t].nonzero().flatten()]
        for t in range(11)
    ]
    truth = torch.stack([torch.stack(of_token).sum(0) for of_token in weighted])[:, None]
    truth.backward(upstream.double())
    grads = [leaf.grad for leaf in (tokens, probs, *layer.parameters())]
    assert_close(dtype, [output, *grads], [truth, *(leaf.grad for leaf in leaves)])


def test_rows_are_sorted_by_expert_and_restored() -> None:
    counts_PL = torch.tensor([[2, 0, 3], [1, 4, 0], [0, 0, 1], [5, 1, 1]])
    labels = [(p, e, i) for p in range(4) for e in range(3) for i in range(counts_PL[p, e])]
    order = by_own_expert(counts_PL, len(labels))
    rows = torch.tensor(labels, dtype=torch.float32).requires_grad_()
    sorted_rows = order.spread(rows)
    assert sorted_rows.tolist() == [list(map(float, x)) for x in sorted(labels, key=lambda x: (x[1], x[0], x[2]))]
    assert torch.equal(order.collect(sorted_rows), rows)
    upstream = drawn(len(labels), 3, dtype=torch.float32)
    sorted_rows.backward(upstream)
    assert rows.grad is not None and torch.equal(rows.grad, order.collect(upstream))


@pytest.mark.parametrize("changes", [{}, {"activation_func": BOUNDED, "add_bias_linear": True}])
def test_experts_need_no_host_reads(alone: ProcessGroupCollection, changes: dict[str, Any]) -> None:
    """Forward and backward run with fake tensors, which raise an error if the host reads a value."""
    config = configuration(torch.bfloat16, 32, 24, 6, chosen=3, **changes)
    with FakeTensorMode() as mode:
        layer, dispatcher = GroupedExperts(6, config), TokenDispatcher(config, alone)
        tokens = torch.empty(11, 1, 32, dtype=torch.bfloat16, requires_grad=True)
        chosen, probs = torch.empty(11, 6, dtype=torch.bool), torch.empty(11, 6, requires_grad=True)
        output = routed(dispatcher, layer, tokens, chosen, probs)
        output.backward(torch.empty_like(output))
        order = by_own_expert(torch.empty(4, 3, dtype=torch.int64), 19)
        assert order.spread(torch.empty(19, 32)).shape == (19, 32)
        assert probs.grad is not None and tokens.grad is not None and tokens.grad.shape == tokens.shape
        with pytest.raises(DataDependentOutputException):  # separate products read values
            expert_products(torch.empty(9, 30), torch.empty(6, 4, 30), torch.empty(6, dtype=torch.int64))
    assert mode is not None
