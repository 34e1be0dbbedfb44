"""Attention of short bfloat16 segments on a CPU by plain matrix products.

The flash kernel of torch for CPUs is designed for long sequences. For segments of 73 tokens, the kernel takes four
times as long, mostly in the backward pass. Scores and softmax are float32, as in fused kernels. Attention
probabilities are kept for the backward pass in bfloat16, where a kernel would recompute them.

Shape legend: t tokens of a pack, h query heads, g key/value heads, d channels, r = h / g; S segments of a rectangle, L
the longest segment of the rectangle, Q = S g r L rows of queries in all rectangles, K = S g L rows of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megappo.families.architecture import SHORT_SEGMENT
from megappo_kernels.autograd import ContextWith

_LEAST_SHARE = 0.8
"""Minimum length of a segment in a rectangle, as a share of the longest segment. A shorter segment starts another
rectangle."""
BLOCK_BYTES = 2**21
"""Bytes of float32 scores in one block. A block fits into the caches of a CPU."""


def takes_products(query: Tensor, lengths: Sequence[int], window: int | None) -> bool:
    """Return whether plain products are faster for segments that attend only to themselves. In float32, the kernel of
    torch is equally fast."""
    if query.is_cuda or query.dtype != torch.bfloat16:
        return False
    return max(lengths) <= min(SHORT_SEGMENT, window or SHORT_SEGMENT)


def attend_short(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    """Return the causal attention of segments: (t, h, d) queries, (t, g, d) keys and values -> (t, h, d)."""
    output: Tensor = _Products.apply(query, key, value, _places(lengths, query.shape[1], key.shape[1]), scale)
    return output


@dataclass(frozen=True)
class _Rectangle:
    """Segments of similar lengths, with their rows among the rows of all rectangles."""

    segments: int
    longest: int
    queries: slice
    keys: slice
    bias_LL: Tensor
    """Bias for the score of each query (row) and key (column), float32: -inf for masked keys, otherwise 0."""


@dataclass(frozen=True)
class _Places:
    """Mapping between the rows of a pack and consecutive rectangles of S x g x r x L rows. Padding repeats the last
    token of the segment. The causal mask hides padding from all other tokens, and padding gets no gradient."""

    rectangles: tuple[_Rectangle, ...]
    queries_Q: Tensor
    """Row of (t h, d) for each row of the rectangles."""
    keys_K: Tensor
    of_queries: Tensor
    """Row of the rectangles for each row of the pack, (t h,)."""
    of_keys: Tensor
    padding: Tensor
    """Padding rows of queries in the rectangles."""


@lru_cache(maxsize=32)
def _places(lengths: tuple[int, ...], heads: int, groups: int) -> _Places:
    """Return the mapping for the lengths. The mapping is cached because all layers of a microbatch share it."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rectangles, queries, keys, real = list[_Rectangle](), list[Tensor](), list[Tensor](), list[Tensor]()
    of_queries, of_keys = torch.empty(int(starts[-1]), heads).long(), torch.empty(int(starts[-1]), groups).long()
    first_query = first_key = 0
    for members in _similar(lengths):
        longest, own = lengths[members[0]], torch.tensor([lengths[i] for i in members])
        steps = torch.arange(longest)
        is_real_SL = steps < own[:, None]
        tokens_SL = starts[list(members)][:, None] + torch.minimum(steps, own[:, None] - 1)
        for per_token, rows, inverse, first in (
            (heads, queries, of_queries, first_query),
            (groups, keys, of_keys, first_key),
        ):
            rows.append((tokens_SL[:, None] * per_token + torch.arange(per_token)[:, None]).flatten())
            places = torch.arange(first, first + len(rows[-1])).view(len(members), per_token, longest)
            inverse[tokens_SL[is_real_SL]] = places.transpose(1, 2)[is_real_SL]
        real.append(is_real_SL[:, None].expand(-1, heads, -1).flatten())
        slices = slice(first_query, first_query + len(queries[-1])), slice(first_key, first_key + len(keys[-1]))
        bias_LL = torch.full((longest, longest), -torch.inf).triu(1)
        rectangles.append(_Rectangle(len(members), longest, *slices, bias_LL))
        first_query, first_key = slices[0].stop, slices[1].stop
    inverses = of_queries.flatten(), of_keys.flatten()
    return _Places(
        tuple(rectangles), torch.cat(queries), torch.cat(keys), *inverses, (~torch.cat(real)).nonzero().squeeze(1)
    )


def _similar(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of segment indices with similar lengths. Each group starts with its longest segment."""
    members: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if members and lengths[i] < _LEAST_SHARE * lengths[members[0]]:
            yield members
            members = []
        members.append(i)
    yield members


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: ContextWith[tuple[_Places, float, tuple[torch.Size, torch.Size]]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        places: _Places,
        scale: float,
    ) -> Tensor:
        queries_Qd = _rows(query, places.queries_Q)
        keys_Kd, values_Kd = (_rows(x, places.keys_K) for x in (key, value))
        out_Qd, shares = torch.empty_like(queries_Qd), []
        for rectangle in places.rectangles:
            q, out = (x[rectangle.queries].view(-1, *_shape(query, key, rectangle)) for x in (queries_Qd, out_Qd))
            k, v = (x[rectangle.keys].view(len(q), rectangle.longest, -1) for x in (keys_Kd, values_Kd))
            share = q.new_empty(*q.shape[:2], rectangle.longest)
            for block in _blocks(q, rectangle.longest):
                scores = torch.bmm(q[block].float().mul_(scale), k[block].float().transpose(1, 2))
                scores.unflatten(1, (-1, rectangle.longest)).add_(rectangle.bias_LL)
                torch.bmm(share[block].copy_(scores.softmax(-1)), v[block], out=out[block])
            shares.append(share)
        ctx.save_for_backward(queries_Qd, keys_Kd, values_Kd, *shares)
        ctx.saved = places, scale, (query.shape, key.shape)
        return out_Qd.index_select(0, places.of_queries).view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: ContextWith[tuple[_Places, float, tuple[torch.Size, torch.Size]]], grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        queries_Qd, keys_Kd, values_Kd, *shares = ctx.saved_tensors
        places, scale, (shape, of_key_shape) = ctx.saved
        grad_Qd = _rows(grad, places.queries_Q).index_fill_(0, places.padding, 0)
        of_queries, of_keys, of_values = (torch.empty_like(x) for x in (queries_Qd, keys_Kd, values_Kd))
        for rectangle, share in zip(places.rectangles, shares, strict=True):
            rows, columns = rectangle.queries, rectangle.keys
            q, grad_out, of_q = (x[rows].view(*share.shape[:2], -1) for x in (queries_Qd, grad_Qd, of_queries))
            k, v, of_k, of_v = (
                x[columns].view(len(share), rectangle.longest, -1) for x in (keys_Kd, values_Kd, of_keys, of_values)
            )
            for block in _blocks(q, rectangle.longest):
                torch.bmm(share[block].transpose(1, 2), grad_out[block], out=of_v[block])
                of_share, wide = torch.bmm(grad_out[block], v[block].transpose(1, 2)).float(), share[block].float()
                # Backward of softmax as in autograd: wide * (of_share - mean of of_share weighted by the shares).
                of_scores = torch._softmax_backward_data(of_share, wide, -1, wide.dtype).mul_(scale).to(q.dtype)
                torch.bmm(of_scores, k[block], out=of_q[block])
                torch.bmm(of_scores.transpose(1, 2), q[block], out=of_k[block])
        return (
            of_queries.index_select(0, places.of_queries).view(shape),
            of_keys.index_select(0, places.of_keys).view(of_key_shape),
            of_values.index_select(0, places.of_keys).view(of_key_shape),
            None,
            None,
        )


def _rows(x: Tensor, places: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).index_select(0, places)


def _shape(query: Tensor, key: Tensor, rectangle: _Rectangle) -> tuple[int, int]:
    """Return the number of query rows that share a key head, and the number of channels."""
    return query.shape[1] // key.shape[1] * rectangle.longest, query.shape[2]


def _blocks(queries: Tensor, longest: int) -> Iterator[slice]:
    """Yield blocks of (segment, key head) pairs with at most `BLOCK_BYTES` of scores each."""
    step = max(1, BLOCK_BYTES // (4 * queries.shape[1] * longest))
    return (slice(start, start + step) for start in range(0, len(queries), step))
