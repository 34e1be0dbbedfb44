"""Packed attention: the choice of the kernel, and arguments for which the GPU kernel computes the CPU result."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.families.rope import Rope
from megappo.megatron.context import ContextShard
from megappo.megatron.layers import attention, short_attention
from megappo.megatron.layers.attention import PackedCoreAttention, takes_packs
from megappo.megatron.layers.rotary import PackedRotary
from megappo.megatron.layers.short_attention import takes_products
from megappo.megatron.segments import PackedSegments, packed_segments, segment_tensors
from tests.support.kernels import relative

LENGTHS = (5, 1, 9, 2)
SCALE = 0.3


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "taken"),
    [
        (torch.bfloat16, 128, (9, 0), True), (torch.bfloat16, 8, (8, 0), True), (torch.bfloat16, 256, (12, 0), True),
        (torch.float32, 128, (9, 0), False), (torch.bfloat16, 128, (7, 5), False), (torch.bfloat16, 128, None, False),
        (torch.bfloat16, 12, (9, 0), False), (torch.bfloat16, 264, (9, 0), False),
    ],
)  # fmt: skip
def test_kernel_is_used_for_supported_inputs(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int] | None, taken: bool
) -> None:
    assert takes_packs(dtype, head_dim, capability) is taken


Segment = tuple[Tensor, Tensor, Tensor, Tensor, slice, slice]


def segments_of(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float,
    is_causal: bool, *, scale: float, left: int, right: int,
) -> Iterator[Segment]:  # fmt: skip
    """Yield the queries, keys and values for each query head and the probabilities (h, i, j) of each segment. The
    semantics and the checks follow the kernel of aten's `_flash_attention_forward`."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.is_contiguous() and cu_k.is_contiguous()
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert type(max_q) is type(max_k) is int and not dropout
    heads, groups, width = query.shape[1], key.shape[1], query.shape[2]
    assert heads % groups == 0 and width % 8 == 0 and width <= 256
    right = 0 if is_causal else right
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        rows, columns = slice(int(q0), int(q1)), slice(int(k0), int(k1))
        q, k, v = query[rows], *(x[columns].repeat_interleave(heads // groups, dim=1) for x in (key, value))
        assert len(q) <= max_q and len(k) <= max_k
        distance = torch.arange(len(k))[None] - torch.arange(len(q))[:, None] - (len(k) - len(q))
        hidden = (distance > right) if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
        hidden |= (distance < -left) if left >= 0 else False
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        yield q, k, v, scores.masked_fill(hidden, -torch.inf).softmax(-1), rows, columns


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _out: Tensor, _statistics: Tensor, *rest: Any,
    scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    gradients = [torch.zeros(x.shape) for x in (query, key, value)]
    windows: dict[str, Any] = {"left": window_size_left, "right": window_size_right}
    for q, k, v, p, rows, columns in segments_of(query, key, value, *rest[:6], scale=scale, **windows):
        grad_weights = torch.einsum("ihd,jhd->hij", grad[rows], v)
        of_scores = p * (grad_weights - (grad_weights * p).sum(-1, keepdim=True)) * scale
        gradients[0][rows] = torch.einsum("hij,jhd->ihd", of_scores, k)
        for total, per_head in (
            (gradients[1], torch.einsum("hij,ihd->jhd", of_scores, q)),
            (gradients[2], torch.einsum("hij,ihd->jhd", p, grad[rows])),
        ):
            total[columns] = per_head.unflatten(1, (key.shape[1], -1)).sum(2)
    return tuple(gradients)


@pytest.fixture
def flash_on_cpu() -> Iterator[list[dict[str, Any]]]:
    """Replace the CUDA kernels of torch's variable-length attention, and yield the arguments of each forward call."""
    calls: list[dict[str, Any]] = []

    def forward(*tensors: Any, return_debug_mask: Any = None, **options: Any) -> tuple[Tensor, ...]:
        arguments = tensors[:9]  # some versions pass `return_debug_mask` afterwards
        windows = {"left": options["window_size_left"], "right": options["window_size_right"]}
        calls.append({"max": list(arguments[5:7]), "causal": arguments[8], **windows})
        segments = segments_of(*arguments, scale=options["scale"], **windows)
        out = torch.cat([torch.einsum("hij,jhd->ihd", p, v) for _, _, v, p, _, _ in segments])
        statistics = torch.zeros(arguments[0].shape[1], len(arguments[0]))
        unused = torch.zeros(2, dtype=torch.uint64)
        return out, statistics, unused, unused.clone(), torch.zeros(0)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield calls
    library._destroy()


def config_with(window: int | None) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig  # import after megappo has prepared it

    return TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip


def outputs(core: Any, segments: PackedSegments, heads: int, groups: int) -> list[Tensor]:
    """Return the result and the gradients for queries and keys with the given numbers of heads."""
    g = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    # Megatron passes parts of one matrix, and the values are not contiguous.
    both = torch.randn(total, heads + 2 * groups, 8, generator=g, requires_grad=True)
    query, key, value = both.split([heads, groups, groups], dim=1)
    out = core(query, key, value, None, packed_seq_params=segments)
    assert out.shape == (total, heads * 8)
    (gradient,) = torch.autograd.grad(out, both, torch.randn(out.shape, generator=g))
    return [out.detach(), gradient]


@pytest.mark.parametrize(("window", "groups"), itertools.product((None, 3, 100), (4, 2, 1)))
def test_one_call_equals_calls_per_segment(
    flash_on_cpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, window: int | None, groups: int
) -> None:
    core = PackedCoreAttention(config_with(window), 1, None, "self", softmax_scale=SCALE)
    segments = packed_segments(LENGTHS, segment_tensors(LENGTHS))
    expected = outputs(core, segments, 4, groups)
    assert not flash_on_cpu
    monkeypatch.setattr(attention, "takes_packs", lambda *_: True)
    results = outputs(core, segments, 4, groups)
    (call,) = flash_on_cpu  # one call for the whole pack
    assert call == {"max": [9, 9], "causal": window is None, "left": -1 if window is None else window - 1, "right": 0}
    for mine, theirs in zip(results, expected, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-5


@pytest.mark.parametrize(("window", "groups", "rank"), itertools.product((None, 3, 100), (4, 2), (0, 2)))
def test_one_call_equals_calls_per_chunk(
    flash_on_cpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, window: int | None, groups: int, rank: int
) -> None:
    """The rank has a part of a pack and all keys that its chunks attend to."""
    lengths, shard = (12, 6, 18), ContextShard(3, rank)
    chunks = packed_segments(lengths, segment_tensors(lengths, shard), shard).chunks
    assert chunks is not None
    seen = dataclasses.replace(chunks, key_rows=None)  # the keys are already gathered
    core: Any = PackedCoreAttention(config_with(window), 1, None, "self", softmax_scale=SCALE)
    g = torch.Generator().manual_seed(3)
    query = torch.randn(sum(seen.lengths), 4, 8, generator=g, requires_grad=True)
    both = torch.randn(sum(seen.key_lengths), 2, groups, 8, generator=g, requires_grad=True)
    results = []
    for takes in (False, True):
        monkeypatch.setattr(attention, "takes_packs", lambda *_, takes=takes: takes)
        out = core(query, *both.unbind(1), None, packed_seq_params=seen)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
        results.append([out.detach(), *torch.autograd.grad(out, (query, both), upstream)])
    (call,) = flash_on_cpu
    assert call["max"] == [max(seen.lengths), max(seen.key_lengths)]
    for mine, theirs in zip(*results, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-5


def plain(
    tensors: list[Tensor], lengths: tuple[int, ...], window: int | None = None, cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention segment by segment for queries (t, h, d) and keys and values (t, g, d). `cap` limits the
    scores, and `sinks` removes a part of the attention weights of each head."""
    heads = tensors[0].shape[1]
    query, key, value = (x.repeat_interleave(heads // x.shape[1], dim=1).split(lengths) for x in tensors)
    outputs = []
    for q, k, v in zip(query, key, value, strict=True):
        scores = torch.einsum("ihd,jhd->hij", q, k) * SCALE
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        distance = torch.arange(len(q))[None] - torch.arange(len(q))[:, None]
        hidden = (distance > 0) | (distance <= -(window or len(q)))
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        nowhere = 0 if sinks is None else sinks.exp()[:, None, None]
        outputs.append(torch.einsum("hij,jhd->ihd", weights / (weights.sum(-1, keepdim=True) + nowhere), v))
    return torch.cat(outputs).flatten(1)


@pytest.mark.parametrize(
    ("lengths", "window", "groups"), itertools.product(((5, 1, 9, 2), (9, 8, 7)), (None, 3, 6), (2, 1))
)
def test_scores_with_a_cap(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], window: int | None, groups: int
) -> None:
    """No kernel is used on any GPU. Queries are processed in blocks of four."""
    monkeypatch.setattr(attention, "takes_packs", lambda *_: True)
    monkeypatch.setattr(attention, "PRODUCT_ROWS", 4)
    core = PackedCoreAttention(config_with(window), 1, None, "self", softmax_scale=SCALE, scores_cap=0.7)
    g = torch.Generator().manual_seed(3)
    inputs = [torch.randn(sum(lengths), n, 8, generator=g, requires_grad=True) for n in (4, groups, groups)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    segments = packed_segments(lengths, segment_tensors(lengths))
    assert (segments.slots is not None) == (lengths == (9, 8, 7))
    out, truth = core(*inputs, None, packed_seq_params=segments), plain(exact, lengths, window, 0.7)
    upstream = torch.randn(out.shape, generator=g)
    gradients, true = torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(truth, exact, upstream.double())
    for mine, theirs in zip((out, *gradients), (truth, *true), strict=True):
        assert float((mine - theirs).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("lengths", "window", "groups"), itertools.product(((5, 1, 9, 2), (9, 8, 7)), (None, 3, 6), (2, 1))
)
def test_sinks(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], window: int | None, groups: int) -> None:
    """The test compares float32 and bfloat16, including the gradient of the sinks. Short bfloat16 segments do not
    use the products for short segments."""
    monkeypatch.setattr(attention, "takes_packs", lambda *_: True)
    monkeypatch.setattr(attention, "PRODUCT_ROWS", 4)
    g = torch.Generator().manual_seed(3)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        config = dataclasses.replace(config_with(window), params_dtype=dtype)
        core = PackedCoreAttention(config, 1, None, "self", softmax_scale=SCALE, has_sinks=True)
        assert core.sinks is not None and core.sinks.shape == (4,) and core.sinks.dtype == dtype
        core.sinks.data.copy_(torch.randn(4, generator=g))
        shapes = [(sum(lengths), n, 8) for n in (4, groups, groups)]
        inputs = [torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in shapes]
        exact = [x.detach().double().requires_grad_() for x in (*inputs, core.sinks)]
        out = core(*inputs, None, packed_seq_params=packed_segments(lengths, segment_tensors(lengths)))
        truth = plain(exact[:3], lengths, window, sinks=exact[3])
        upstream = torch.randn(out.shape, generator=g).to(dtype)
        gradients = torch.autograd.grad(out, [*inputs, core.sinks], upstream)
        true = torch.autograd.grad(truth, exact, upstream.double())
        for mine, theirs in zip((out, *gradients), (truth, *true), strict=True):
            assert float((mine - theirs).norm() / theirs.norm()) < bound


@pytest.mark.parametrize(
    ("lengths", "window", "device", "dtype", "taken"),
    [((256, 3), None, "cpu", torch.bfloat16, True), ((3, 257), None, "cpu", torch.bfloat16, False),
     ((5, 9), 9, "cpu", torch.bfloat16, True), ((5, 9), 8, "cpu", torch.bfloat16, False),
     ((5, 9), None, "cpu", torch.float32, False)],
)  # fmt: skip
def test_products_are_used_for_short_segments(
    lengths: tuple[int, ...], window: int | None, device: str, dtype: torch.dtype, taken: bool
) -> None:
    assert takes_products(torch.zeros(1, dtype=dtype, device=device), lengths, window) is taken


@pytest.mark.parametrize("groups", [6, 2, 1])
@pytest.mark.parametrize("lengths", [(7,), (9, 9, 9), (40, 5, 70, 64, 1, 12)])
def test_short_segments_in_bfloat16(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], groups: int) -> None:
    """The segments use one rectangle per group of lengths and several blocks of scores, without a torch kernel. Each
    rounding to bfloat16 has an error of at most 2^-8, and 2^-9 on average. Attention weights and gradients of scores
    are also rounded."""
    monkeypatch.setattr(attention, "scaled_dot_product_attention", None)
    monkeypatch.setattr(short_attention, "BLOCK_BYTES", 4 * 6 * 70 * 70)
    core = PackedCoreAttention(config_with(None), 1, None, "self", softmax_scale=SCALE)
    g = torch.Generator().manual_seed(3)
    # Megatron passes parts of one matrix, and the values are not contiguous.
    both = torch.randn(sum(lengths), 6 + 2 * groups, 8, generator=g).bfloat16().requires_grad_()
    exact = both.detach().double().requires_grad_()
    segments = packed_segments(lengths, segment_tensors(lengths))
    out = core(*both.split([6, groups, groups], dim=1), None, packed_seq_params=segments)
    truth = plain(list(exact.split([6, groups, groups], dim=1)), lengths)
    upstream = torch.randn(out.shape, generator=g).bfloat16()
    (mine,) = torch.autograd.grad(out, both, upstream)
    (true,) = torch.autograd.grad(truth, exact, upstream.double())
    for result, expected, roundings in ((out.detach(), truth.detach(), 2), (mine, true, 4)):
        assert result.dtype == torch.bfloat16
        assert float((result - expected).norm() / expected.norm()) < roundings * 2**-9
    with torch.no_grad():  # no attention weights are stored
        again = core(*both.split([6, groups, groups], dim=1), None, packed_seq_params=segments)
    assert torch.equal(again, out)


def test_short_segments_do_not_affect_each_other() -> None:
    """Garbage in one segment changes no output and no gradient of another segment."""
    lengths, groups = (6, 5, 5), 2
    core = PackedCoreAttention(config_with(None), 1, None, "self", softmax_scale=SCALE)
    segments = packed_segments(lengths, segment_tensors(lengths))
    results = []
    for garbage in (0.0, float("nan")):
        both = torch.randn(16, 4 + 2 * groups, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
        both[6:11] = garbage
        both.requires_grad_()
        out = core(*both.split([4, groups, groups], dim=1), None, packed_seq_params=segments)
        (gradient,) = torch.autograd.grad(out, both, torch.ones_like(out))
        others = [*range(6), *range(11, 16)]
        results.append((out.detach()[others], gradient[others]))
        assert bool(out[6:11].isnan().any()) == (garbage != 0)
    assert all(
        torch.equal(clean, spoiled) and bool(clean.isfinite().all()) for clean, spoiled in zip(*results, strict=True)
    )


def test_window_is_set_per_layer() -> None:
    config = config_with(7)
    config.window_attn_skip_freq = [1, 0]
    assert [PackedCoreAttention(config, number, None, "self").window for number in (1, 2)] == [7, None]


def test_angles_stay_float32() -> None:
    """Angles are float32 as in SGLang. At position 32,767 they are closer to float64 than bfloat16."""
    frequencies = 1e6 ** -(torch.arange(32) / 32)
    positions = torch.tensor([0, 1, 32_767])
    result = PackedRotary([Rope(frequencies, 1.0)])(positions, packed_seq=True, cp_group=None)
    angles = positions.double()[:, None] * frequencies.double()
    true = torch.stack([f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin)])
    assert result.dtype == torch.float32 and result.shape == (2, 3, 1, 64)
    assert relative(result, true) < 0.3 * relative(true.bfloat16(), true)
