"""The gated delta rule over packed segments: linear attention with a state that is reset for each segment.

A head's state S is a matrix of key by value channels. A token with key k, value v, decay g <= 0 and strength b in (0,
1) changes the state to S' = exp(g) S + k u^T with u = b (v - exp(g) S^T k). The update corrects the stored value for
the key. The output of the token is S'^T q (Yang et al. 2024, arXiv:2412.06464). Queries and keys are normalised to
unit vectors. Queries are divided by the square root of their number of channels.

A computation token by token would take one product per token. Here, each segment is split into chunks of `DELTA_CHUNK`
tokens. All corrections within a chunk are the solution of one triangular system (the UT transform of Yang et al. 2024,
arXiv:2406.06484), which is solved for all chunks of the pack at the same time. States are then passed from chunk to
chunk in parallel for all segments, so the number of sequential steps is the number of chunks of the longest segment.
The arithmetic is float32 or wider, as in transformers. The backward pass recomputes the chunks, because a stored state
for each chunk would take far more memory than the inputs.

Shape legend: t tokens of a pack, n chunks, c tokens of a chunk, s segments; g key heads, r value heads of each key
head, k and v channels of a key and of a value.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import conv1d, softplus
from torch.utils.checkpoint import checkpoint

from megappo.families.architecture import DELTA_CHUNK as CHUNK
from megappo.megatron.segments import Chunks, PackedSegments

# The value is that of `l2norm` for queries and keys in transformers.
_EPS = 1e-6


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, chunks: Chunks
) -> Tensor:
    """Return the outputs (t, g, r, v) of all tokens in the type of the values.

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
    system = (k @ k.transpose(-1, -2))[:, :, None] * between * b[..., None]  # the solver uses ones on the diagonal
    since = total.exp()[..., None]
    own = torch.cat([v, since * k[:, :, None]], dim=-1) * b[..., None]
    own = torch.linalg.solve_triangular(system, own, upper=False, unitriangular=True)
    corrections, expected = own.split([v.shape[-1], k.shape[-1]], dim=-1)
    q = since * q[:, :, None]
    k = (total[..., -1:] - total).exp()[..., None] * k[:, :, None]
    read = _scan(q, k, corrections, expected, seen, since[..., -1:, :], chunks.active)
    return chunks.take(read.permute(0, 3, 1, 2, 4)).to(value.dtype)


def _scan(
    q: Tensor, k: Tensor, corrections: Tensor, expected: Tensor, seen: Tensor, carry: Tensor, active: tuple[int, ...]
) -> Tensor:
    """Return the outputs (n, g, r, c, v) of all tokens, from the state before their chunk and from the tokens of their
    chunk.

    The corrections of a chunk are the corrections for an empty state (`corrections`) minus the values that the state
    already stores (`expected` times the state).
    """
    reads, state = list[Tensor](), None
    for start, count in zip(itertools.accumulate(active, initial=0), active, strict=False):
        rows = slice(start, start + count)
        written, read = corrections[rows], None
        if state is not None:
            state = state[:count]
            written = written - expected[rows] @ state
            read = q[rows] @ state
        of_chunk = seen[rows] @ written
        reads.append(of_chunk if read is None else read + of_chunk)
        added = k[rows].transpose(-1, -2) @ written
        state = added if state is None else carry[rows] * state + added
    return torch.cat(reads)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def wide(x: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own type if that type is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def decays(a: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    """Return (t, h) negative numbers: the logarithm of the factor by which each token decays the state of each head."""
    return -wide(log_rate).exp() * softplus(wide(a) + bias)


def causal_convolution(x: Tensor, weight: Tensor, segments: PackedSegments) -> Tensor:
    """Return the causal depthwise convolution of (t, d) with weights (d, 1, w). Each output depends on its token and
    on the w - 1 previous tokens of its segment.

    The whole pack is one convolution with zeros before each segment.
    """
    reach = weight.shape[-1] - 1
    segment_t = (segments.positions == 0).cumsum(0)
    places_t = torch.arange(len(x), device=x.device) + reach * segment_t
    padded = x.new_zeros(len(x) + reach * len(segments.lengths), x.shape[1]).index_copy(0, places_t, x)
    out = conv1d(padded.t()[None], weight, groups=len(weight))[0].t()
    return out.index_select(0, places_t - reach)
