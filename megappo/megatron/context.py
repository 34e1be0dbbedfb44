"""Context parallelism: ranks split the tokens of every sample and gather each other's keys and values.

Each segment of a pack is cut into 2 CP chunks of equal length. Rank r has the r-th chunk from the beginning and the
r-th from the end, as in Megatron-LM and Transformer Engine: under a causal mask all ranks then have the same amount of
attention to compute. Everything but attention works token by token and needs only positions.

Attention gathers the keys and values of all ranks once per layer, and backward reduce-scatters their gradients (Llama
Team 2024, arXiv:2407.21783, section 3.3.2). A ring, which passes keys and values around while every rank attends to
what it has, receives the same number of bytes: (CP - 1) / CP of those of the pack. A ring hides them behind attention
where segments are long, in CP - 1 messages a layer and pass; segments of PPO are many and short, and grouped queries
make keys few. A ring also needs sums of exponentials, which torch's attention on CPUs does not return. Gathered keys
and values stay whole on every rank until the layer's backward, unless `recompute_modules` has core_attn; `megappo plan`
counts them.

Transformer Engine has a ring of its own, which takes the same chunks.

Shape legend: t tokens of a pack, l = t / CP of them on this rank, k keys that its queries see, g key/value heads, d
channels; W response tokens of the pack, N of them predicted on this rank.
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
    """One rank of a context parallel group; the lengths of all segments are multiples of 2 CP."""

    size: int
    rank: int

    def padded(self, tokens: int) -> int:
        """Length that a segment of so many tokens is padded to."""
        return padded_tokens(tokens, self.size)

    def chunks(self, lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """This rank's chunks in their local order: (start of the segment in the pack, start and stop of the chunk in
        the segment)."""
        start = 0
        for length in lengths:
            chunk = length // (2 * self.size)
            for number in (self.rank, 2 * self.size - 1 - self.rank):
                yield start, number * chunk, (number + 1) * chunk
            start += length

    def chunk_lengths(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Queries of each chunk, and keys of each chunk: the tokens of its segment up to the chunk's end."""
        ends = [(start, stop) for _, start, stop in self.chunks(lengths)]
        return tuple(stop - start for start, stop in ends), tuple(stop for _, stop in ends)

    def places(self, lengths: Sequence[int]) -> Tensor:
        """(l,) int64: positions of this rank's tokens in the pack."""
        if self.size == 1:
            return torch.arange(sum(lengths))
        return torch.cat([torch.arange(start + a, start + b) for start, a, b in self.chunks(lengths)])

    def find(self, places_W: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Find which places in the pack are on this rank. Returns two (N,) int64 tensors: their local rows, and their
        indices among the W places."""
        if self.size == 1:
            return places_W, torch.arange(len(places_W))
        mine = self.places(lengths)
        here = torch.full((sum(lengths),), -1).index_copy(0, mine, torch.arange(len(mine)))[places_W]
        own_N = (here >= 0).nonzero().squeeze(1)
        return here[own_N], own_N

    def key_rows(self, lengths: Sequence[int]) -> Tensor:
        """(k,) int64: rows that this rank's chunks attend to among the gathered keys of all ranks, which are
        concatenated by rank. Each chunk has the rows of its segment up to the chunk's end."""
        gathered = torch.cat([ContextShard(self.size, rank).places(lengths) for rank in range(self.size)])
        row_of = torch.empty_like(gathered).index_copy(0, gathered, torch.arange(len(gathered)))
        return torch.cat([row_of[start : start + b] for start, _, b in self.chunks(lengths)])


WHOLE = ContextShard(1, 0)
"""The shard of packs that are not split."""


def gather_keys_values(key: Tensor, value: Tensor, rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gather keys and values of all ranks and select `rows`: (l, g, d) each -> (k, g, d); backward reduce-scatters."""
    both = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), group=group)
    return both.index_select(0, rows).unbind(1)


def whole_output(output_N: Tensor, own_N: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """(W,) on all ranks: puts together the numbers that each rank has at its indices `own_N` of the `total`."""
    whole_W = output_N.new_zeros(total).index_copy(0, own_N, output_N)
    dist.all_reduce(whole_W, group=group)
    return whole_W
