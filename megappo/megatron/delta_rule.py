"""The gated delta rule over packed segments: linear attention whose state starts anew in each segment.

A head's state S is a matrix of key by value channels. A token with key k, value v, decay g <= 0 and strength b in (0,
1) changes it to S' = exp(g) S + k u^T with u = b (v - exp(g) S^T k): it corrects what the state stores for its key. The
token's output is S'^T q (Yang et al. 2024, arXiv:2412.06464). Queries and keys are normalised to unit vectors, and
queries divided by the root of their number of channels.

Token by token this would take as many products as there are tokens. Here each segment is cut into chunks of
`DELTA_CHUNK` tokens. Within a chunk all corrections solve one triangular system (the UT transform of Yang et al. 2024,
arXiv:2406.06484), for all chunks of the pack at once. States are then passed from chunk to chunk, for all segments in
parallel, so the sequential steps are the chunks of the longest segment. Arithmetic is float32 or wider, as in
transformers. Backward recomputes the chunks: keeping a state for each would take far more memory than the inputs.

Shape legend: t tokens of a pack, n chunks, c tokens of a chunk, s segments; g key heads, r value heads of each, k and v
channels of a key and of a value.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv1d, softplus
from torch.utils.checkpoint import checkpoint

from megappo.families.architecture import DELTA_CHUNK as CHUNK
from megappo.megatron.attention import PackedSegments

# As transformers' `l2norm` of queries and keys.
_EPS = 1e-6


@dataclass(frozen=True)
class Chunks:
    """How the tokens of a pack are laid out in chunks, none of which has tokens of two segments.

    The first chunks of all segments come first, then all second chunks, so that the chunks of one step are neighbours.
    Longer segments stand before shorter ones, so that the segments of a step are the first ones of the step before.
    """

    slots_t: Tensor
    """int64: row of each token among the rows of all chunks."""
    active: tuple[int, ...]
    """Number of segments that have a first chunk, a second chunk, and so on."""

    @classmethod
    def of(cls, segments: PackedSegments) -> Chunks:
        """Lay out the pack's segments. Computed on the pack's device from its tensors; the host knows the lengths and
        does not wait."""
        counts = sorted((-(-n // CHUNK) for n in segments.lengths), reverse=True)
        active = [sum(count > step for count in counts) for step in range(counts[0])]
        positions, device = segments.positions, segments.positions.device
        starts = segments.cu_seqlens_q
        chunks_s = (starts.diff() + CHUNK - 1) // CHUNK
        row_s = torch.argsort(torch.argsort(chunks_s, descending=True, stable=True))
        steps = torch.arange(len(active), device=device)
        before = (chunks_s[None] > steps[:, None]).sum(1).cumsum(0)
        first = torch.cat([before.new_zeros(1), before[:-1]])
        segment_t = (positions == 0).cumsum(0) - 1
        chunk_t = first[positions // CHUNK] + row_s[segment_t]
        return cls(chunk_t * CHUNK + positions % CHUNK, tuple(active))

    def put(self, x: Tensor) -> Tensor:
        """(t, ...) -> (n, c, ...), zeros where a chunk has no token."""
        n = sum(self.active)
        return x.new_zeros(n * CHUNK, *x.shape[1:]).index_copy(0, self.slots_t, x).unflatten(0, (n, CHUNK))

    def take(self, x: Tensor) -> Tensor:
        """(n, c, ...) -> (t, ...)."""
        return x.flatten(0, 1).index_select(0, self.slots_t)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, chunks: Chunks
) -> Tensor:
    """Outputs (t, g, r, v) of all tokens, in the type of the values.

    Queries and keys are (t, g, k), values (t, g, r, v), decays and strengths (t, g, r).
    """
    inputs = (query, key, value, decay, strength)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return checkpoint(_read, *inputs, chunks, use_reentrant=False, preserve_rng_state=False)
    return _read(*inputs, chunks)


def _read(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, chunks: Chunks) -> Tensor:
    q, k = (_unit(chunks.put(wide(x))).transpose(1, 2) for x in (query, key))  # (n, g, c, k)
    q = q * query.shape[-1] ** -0.5
    v = chunks.put(wide(value)).permute(0, 2, 3, 1, 4)  # (n, g, r, c, v)
    total, b = (chunks.put(wide(x)).permute(0, 2, 3, 1) for x in (decay, strength))  # (n, g, r, c)
    total = total.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    seen = (q @ k.transpose(-1, -2))[:, :, None] * between
    system = (k @ k.transpose(-1, -2))[:, :, None] * between * b[..., None]  # its diagonal counts as ones
    since = total.exp()[..., None]
    own = torch.cat([v, since * k[:, :, None]], dim=-1) * b[..., None]
    own = torch.linalg.solve_triangular(system, own, upper=False, unitriangular=True)
    wanted, expected = own.split([v.shape[-1], k.shape[-1]], dim=-1)
    q = since * q[:, :, None]
    k = (total[..., -1:] - total).exp()[..., None] * k[:, :, None]
    read = _scan(q, k, wanted, expected, seen, since[..., -1:, :], chunks.active)
    return chunks.take(read.permute(0, 3, 1, 2, 4)).to(value.dtype)


def _scan(
    q: Tensor, k: Tensor, wanted: Tensor, expected: Tensor, seen: Tensor, kept: Tensor, active: tuple[int, ...]
) -> Tensor:
    """(n, g, r, c, v): the outputs of all tokens, from the state before their chunk and from the tokens in it.

    A chunk's corrections are those for an empty state (`wanted`) minus what the state already stores (`expected` times
    it).
    """
    reads, state = list[Tensor](), None
    for start, count in zip(itertools.accumulate(active, initial=0), active, strict=False):
        here = slice(start, start + count)
        written, read = wanted[here], None
        if state is not None:
            state = state[:count]
            written = written - expected[here] @ state
            read = q[here] @ state
        of_chunk = seen[here] @ written
        reads.append(of_chunk if read is None else read + of_chunk)
        added = k[here].transpose(-1, -2) @ written
        state = added if state is None else kept[here] * state + added
    return torch.cat(reads)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def wide(x: Tensor) -> Tensor:
    """The tensor in float32, or in its own type where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def decays(a: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    """(t, h) of numbers below zero: the logarithm of the factor by which each token decays each head's state."""
    return -wide(log_rate).exp() * softplus(wide(a) + bias)


def causal_convolution(x: Tensor, weight: Tensor, segments: PackedSegments) -> Tensor:
    """Causal depthwise convolution of (t, d) with weights (d, 1, w): each token sees itself and the w - 1 tokens before
    it in its segment.

    One convolution of the whole pack, with zeros before each segment.
    """
    reach = weight.shape[-1] - 1
    segment_t = (segments.positions == 0).cumsum(0)
    places_t = torch.arange(len(x), device=x.device) + reach * segment_t
    padded = x.new_zeros(len(x) + reach * len(segments.lengths), x.shape[1]).index_copy(0, places_t, x)
    out = conv1d(padded.t()[None], weight, groups=len(weight))[0].t()
    return out.index_select(0, places_t - reach)
