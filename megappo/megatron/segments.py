"""Segments of a packed microbatch: one segment for each sample. Segments do not attend to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megappo.families.architecture import DELTA_CHUNK
from megappo.megatron.context import WHOLE, ContextShard
from megappo.megatron.layers.router import MicrobatchRouting

# A rectangle of S x L takes one call of SDPA instead of S calls. The call is faster if the padding is small.
_MOST_PADDING = 2.0


@dataclass(frozen=True)
class Chunks:
    """Arrangement of the tokens of a pack in chunks. Each chunk has tokens of only one segment.

    The first chunks of all segments come first, then all second chunks, so the chunks of one step are adjacent.
    Segments are sorted from longest to shortest, so the segments of a step are a prefix of the segments of the
    previous step.
    """

    slots_t: Tensor
    """Row of each token among the rows of all chunks (int64)."""
    active: tuple[int, ...]
    """Number of segments with a first chunk, with a second chunk, and so on."""

    @classmethod
    def of(cls, segments: PackedSegments) -> Chunks:
        """Arrange the segments of the pack in chunks. The tensors are computed on the device of the pack. The host
        already has the lengths and does not synchronise."""
        counts = sorted((-(-n // DELTA_CHUNK) for n in segments.lengths), reverse=True)
        active = [sum(count > step for count in counts) for step in range(counts[0])]
        positions, device = segments.positions, segments.positions.device
        starts = segments.cu_seqlens_q
        chunks_s = (starts.diff() + DELTA_CHUNK - 1) // DELTA_CHUNK
        row_s = torch.argsort(torch.argsort(chunks_s, descending=True, stable=True))
        steps = torch.arange(len(active), device=device)
        before = (chunks_s[None] > steps[:, None]).sum(1).cumsum(0)
        first = torch.cat([before.new_zeros(1), before[:-1]])
        segment_t = (positions == 0).cumsum(0) - 1
        chunk_t = first[positions // DELTA_CHUNK] + row_s[segment_t]
        return cls(chunk_t * DELTA_CHUNK + positions % DELTA_CHUNK, tuple(active))

    def put(self, x: Tensor) -> Tensor:
        """Convert (t, ...) to (n, c, ...), with zeros for missing tokens of a chunk."""
        n = sum(self.active)
        return x.new_zeros(n * DELTA_CHUNK, *x.shape[1:]).index_copy(0, self.slots_t, x).unflatten(0, (n, DELTA_CHUNK))

    def take(self, x: Tensor) -> Tensor:
        """Convert (n, c, ...) to (t, ...)."""
        return x.flatten(0, 1).index_select(0, self.slots_t)


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's description of a packed microbatch, with additional segment lengths on the host. The host can read
    the lengths without synchronising with the device."""

    lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    """Number of keys that the queries of each segment attend to: the length of the segment, or more for a context
    chunk with tokens before it."""
    positions: Tensor = field(kw_only=True)
    """Position of each token of this rank within its segment (int64)."""
    slots: Tensor | None = None
    """Row of each token in the padded (S, L) rectangle, (t,) int64. None if each segment has a
    separate attention call."""
    chunks: PackedSegments | None = None
    """Chunks of the segments on this rank under context parallelism, otherwise None."""
    key_rows: Tensor | None = None
    """Rows of the gathered keys for the chunks of this rank. The field is set only on `chunks` (see
    `ContextShard.key_rows`)."""
    routing: MicrobatchRouting | None = None
    """Routing of the microbatch for models with experts."""
    recurrence: Chunks | None = None
    """Chunks of the gated delta rule. The first linear attention layer sets them for the pack."""


def segment_tensors(lengths: Sequence[int], shard: ContextShard = WHOLE) -> dict[str, Tensor]:
    """Return the tensors that `packed_segments` needs on the device. The tensors are created on the host."""
    positions = torch.cat([torch.arange(n) for n in lengths])
    tensors = {"cu_seqlens": _cumulative(lengths), "positions": positions}
    if shard.size > 1:
        queries, keys = shard.chunk_lengths(lengths)
        tensors["positions"] = positions[shard.places(lengths)]
        tensors |= {"cu_chunks": _cumulative(queries), "cu_keys": _cumulative(keys)}
        return tensors | {"key_rows": shard.key_rows(lengths)}
    longest = max(lengths)
    if len(lengths) > 1 and len(lengths) * longest <= _MOST_PADDING * sum(lengths):
        tensors["slots"] = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(lengths)])
    return tensors


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed_segments(
    lengths: Sequence[int], tensors: Mapping[str, Tensor], shard: ContextShard = WHOLE
) -> PackedSegments:
    """Return the description of a microbatch of segments that do not attend to each other. `tensors` are the tensors
    of `segment_tensors`."""
    whole = {"cu_seqlens_q": tensors["cu_seqlens"], "cu_seqlens_kv": tensors["cu_seqlens"]}
    segments = _described(lengths, lengths, positions=tensors["positions"], slots=tensors.get("slots"), **whole)
    if shard.size > 1:
        segments.cu_seqlens_q_padded = segments.cu_seqlens_kv_padded = tensors["cu_seqlens"]  # for Transformer Engine
        segments.chunks = _described(
            *shard.chunk_lengths(lengths),
            positions=tensors["positions"],
            cu_seqlens_q=tensors["cu_chunks"],
            cu_seqlens_kv=tensors["cu_keys"],
            key_rows=tensors["key_rows"],
        )
    return segments


def _described(lengths: Sequence[int], key_lengths: Sequence[int], **tensors: Any) -> PackedSegments:
    return PackedSegments(
        qkv_format="thd",
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(key_lengths),
        lengths=tuple(lengths),
        key_lengths=tuple(key_lengths),
        **tensors,
    )
