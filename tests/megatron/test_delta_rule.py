"""The gated delta rule over packed segments, compared with the recurrence of transformers and a float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from megappo.megatron.layers.delta_rule import causal_convolution, gated_delta_rule
from megappo.megatron.segments import Chunks, PackedSegments, packed_segments, segment_tensors

LENGTHS = (5, 130, 1, 64, 65, 3, 128)
G, R, K, V = 2, 2, 6, 5


def packed(lengths: tuple[int, ...]) -> PackedSegments:
    return packed_segments(lengths, segment_tensors(lengths))


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def drawn(tokens: int, dtype: torch.dtype) -> Inputs:
    """Draw queries, keys, values, decays and strengths that require gradients."""
    g = torch.Generator().manual_seed(5)
    shapes = [(tokens, G, K), (tokens, G, K), (tokens, G, R, V)]
    made = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    made += [-2 * torch.rand(tokens, G, R, generator=g, dtype=torch.float64) ** 4]
    made += [torch.rand(tokens, G, R, generator=g, dtype=torch.float64)]
    query, key, value, decay, strength = (x.to(dtype).requires_grad_() for x in made)
    return query, key, value, decay, strength


def token_by_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """Compute the recurrence of transformers for one segment in the dtype of the inputs. Transformers always
    computes in float32."""
    unit = [x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key)]
    query, key = unit[0][:, :, None] * K**-0.5, unit[1][:, :, None]
    state, reads = value.new_zeros(G, R, K, V), []
    for q, k, v, d, b in zip(query, key, value, decay, strength, strict=True):
        state = state * d.exp()[..., None, None]
        prediction = (state * k[..., None]).sum(-2)
        state = state + k[..., None] * ((v - prediction) * b[..., None])[..., None, :]
        reads.append((state * q[..., None]).sum(-2))
    return torch.stack(reads)


def test_delta_rule_equals_the_recurrence_of_each_segment() -> None:
    """Outputs and gradients are compared in float64. Segments end before, at and after the end of a chunk, and one
    segment has a single token."""
    inputs = drawn(sum(LENGTHS), torch.float64)
    result = gated_delta_rule(*inputs, Chunks.of(packed(LENGTHS)))
    expected = torch.cat([token_by_token(*of) for of in zip(*(x.split(LENGTHS) for x in inputs), strict=True)])
    assert torch.allclose(result, expected, rtol=0, atol=1e-12)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    pairs = [torch.autograd.grad((out * weights).sum(), inputs) for out in (result, expected)]
    for mine, theirs in zip(*pairs, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-11 * float(theirs.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rule_matches_transformers(dtype: torch.dtype) -> None:
    inputs = drawn(sum(LENGTHS), dtype)
    result = gated_delta_rule(*inputs, Chunks.of(packed(LENGTHS)))
    expected = []
    for query, key, value, decay, strength in zip(*(x.split(LENGTHS) for x in inputs), strict=True):
        repeated = (x.repeat_interleave(R, dim=1) for x in (query, key))
        of_heads = (x.flatten(1, 2) for x in (value, decay, strength))
        every = [x[None] for x in (*repeated, *of_heads)]
        out, _ = torch_recurrent_gated_delta_rule(*every, use_qk_l2norm_in_kernel=True)
        expected.append(out[0].unflatten(1, (G, R)))
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert float((result - torch.cat(expected)).detach().abs().max()) < tolerance


def test_segments_of_a_pack_are_independent() -> None:
    inputs = drawn(sum(LENGTHS), torch.float32)
    together = gated_delta_rule(*inputs, Chunks.of(packed(LENGTHS))).split(LENGTHS)
    parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
    for length, part, (query, key, value, decay, strength) in zip(LENGTHS, together, parts, strict=True):
        alone = gated_delta_rule(query, key, value, decay, strength, Chunks.of(packed((length,))))
        assert torch.allclose(part, alone, rtol=0, atol=1e-6)


def test_steps_equal_the_chunks_of_the_longest_segment() -> None:
    """The first step has all segments. Each token has a separate slot."""
    chunks = Chunks.of(packed(LENGTHS))
    assert chunks.active == (7, 3, 1)
    assert len(set(chunks.slots_t.tolist())) == sum(LENGTHS)
    assert int(chunks.slots_t.max()) < 64 * sum(chunks.active)


@pytest.mark.parametrize("width", [2, 4])
def test_convolution_restarts_in_each_segment(width: int) -> None:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(sum(LENGTHS), 3, generator=g, requires_grad=True)
    weight = torch.randn(3, 1, width, generator=g, requires_grad=True)
    result = causal_convolution(x, weight, packed(LENGTHS))
    expected = torch.cat([causal_conv1d_fn(part.t()[None], weight[:, 0])[0].t() for part in x.split(LENGTHS)])
    assert torch.allclose(result, expected, rtol=0, atol=1e-6)
    pairs = [torch.autograd.grad((out**2).sum(), (x, weight)) for out in (result, expected)]
    assert all(torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4) for mine, theirs in zip(*pairs, strict=True))
