"""Context parallelism: ranks split the tokens of every sample and gather the keys and values of all ranks.

Each segment of a pack is split into 2 CP chunks of equal length. Rank r has the r-th chunk from the beginning and the
r-th chunk from the end, as in Megatron-LM and Transformer Engine. With a causal mask, all ranks then have the same
amount of attention to compute. All operations except attention work token by token and need only positions.

Attention gathers the keys and values of all ranks once per layer, and the backward pass reduce-scatters their
gradients (Llama Team 2024, arXiv:2407.21783, section 3.3.2). In a ring, ranks pass keys and values on while they
attend to the available ones. A ring receives the same number of bytes: (CP - 1) / CP of the keys and values of the
pack. A ring hides the transfer behind attention for long segments, with CP - 1 messages per layer and pass. However,
segments of PPO are many and short, and grouped queries have few keys. A ring also needs sums of exponentials, which
torch's attention on CPUs does not return.

Gathered keys and values stay whole on every rank until the layer's backward pass, unless `recompute_modules` contains
core_attn. `megappo plan` counts this memory.

Transformer Engine has a separate ring, which uses the same chunks.

Shape legend: t tokens of a pack, l = t / CP tokens on this rank, k keys that the queries of the rank attend to, g
key/value heads, d channels; W response tokens of the pack, N of these predicted on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megappo.config.grid import padded_tokens


@dataclass(frozen=True)
class ContextShard:
    """Rank of a context parallel group. The lengths of all segments are multiples of 2 CP."""

    size: int
    rank: int

    def padded(self, tokens: int) -> int:
        """Return the padded length of a segment of `tokens` tokens."""
        return padded_tokens(tokens, self.size)

    def chunks(self, lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield this rank's chunks in their local order, as (start of the segment in the pack, start and stop of the
        chunk in the segment)."""
        start = 0
        for length in lengths:
            chunk = length // (2 * self.size)
            for number in (self.rank, 2 * self.size - 1 - self.rank):
                yield start, number * chunk, (number + 1) * chunk
            start += length

    def chunk_lengths(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the number of queries and the number of keys of each chunk. The keys are the tokens of the segment up
        to the end of the chunk."""
        ends = [(start, stop) for _, start, stop in self.chunks(lengths)]
        return tuple(stop - start for start, stop in ends), tuple(stop for _, stop in ends)

    def places(self, lengths: Sequence[int]) -> Tensor:
        """Return the positions of this rank's tokens in the pack, (l,) int64."""
        if self.size == 1:
            return torch.arange(sum(lengths))
        return torch.cat([torch.arange(start + a, start + b) for start, a, b in self.chunks(lengths)])

    def find(self, places_W: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Find the places in the pack that are on this rank. Return two (N,) int64 tensors: their local rows, and
        their indices among the W places."""
        if self.size == 1:
            return places_W, torch.arange(len(places_W))
        mine = self.places(lengths)
        local_rows = torch.full((sum(lengths),), -1).index_copy(0, mine, torch.arange(len(mine)))[places_W]
        own_N = (local_rows >= 0).nonzero().squeeze(1)
        return local_rows[own_N], own_N

    def key_rows(self, lengths: Sequence[int]) -> Tensor:
        """Return the rows of the gathered keys that this rank's chunks attend to, (k,) int64. The gathered keys of all
        ranks are concatenated by rank. Each chunk has the rows of its segment up to the end of the chunk."""
        gathered = torch.cat([ContextShard(self.size, rank).places(lengths) for rank in range(self.size)])
        row_of = torch.empty_like(gathered).index_copy(0, gathered, torch.arange(len(gathered)))
        return torch.cat([row_of[start : start + b] for start, _, b in self.chunks(lengths)])


WHOLE = ContextShard(1, 0)
"""Shard of packs that are not split."""


def gather_keys_values(key: Tensor, value: Tensor, rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gather keys and values of all ranks and select `rows`: (l, g, d) each -> (k, g, d). The backward pass
    reduce-scatters."""
    both = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), group=group)
    return both.index_select(0, rows).unbind(1)


def whole_output(output_N: Tensor, own_N: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """Return (W,) on all ranks, assembled from the values of each rank at its indices `own_N` of the `total`
    indices."""
    whole_W = output_N.new_zeros(total).index_copy(0, own_N, output_N)
    dist.all_reduce(whole_W, group=group)
    return whole_W
