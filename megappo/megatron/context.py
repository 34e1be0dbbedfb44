"""Context parallelism: ranks share out the tokens of every sample, and hand each other keys and values.

Each segment of a pack is cut into 2 CP chunks of the same length, of which rank r has the r-th from the beginning and
the r-th from the end, as Megatron-LM and Transformer Engine cut it: under a causal mask all ranks have as much to
attend to. Everything but attention works on tokens one by one and needs no more than their positions.

Attention gathers the keys and values of all ranks once per layer, and backward adds up their gradients where they came
from (Llama Team 2024, arXiv:2407.21783, section 3.3.2). A ring, in which they go round while every rank attends to what
it has, receives as many bytes: (CP - 1) / CP of those of the pack. It hides them behind attention, in CP - 1 messages
a layer and pass, where segments are long; those of PPO are many and short, and queries that share keys make keys few.
And it needs sums of exponentials, which torch's attention on CPUs does not give. The gathered ones are whole on every
rank until the layer's backward, unless `recompute_modules` has core_attn; `megappo plan` counts them.

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
    """One of the ranks that share out packs; all segments have lengths that 2 CP divides."""

    size: int
    rank: int

    def padded(self, tokens: int) -> int:
        """What a segment of so many tokens is padded to."""
        return padded_tokens(tokens, self.size)

    def chunks(self, lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """This rank's chunks in their order on it: (start of the segment, start and stop of the chunk in it)."""
        start = 0
        for length in lengths:
            chunk = length // (2 * self.size)
            for number in (self.rank, 2 * self.size - 1 - self.rank):
                yield start, number * chunk, (number + 1) * chunk
            start += length

    def chunk_lengths(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens of each chunk, and of what it sees: its segment up to its own end."""
        ends = [(start, stop) for _, start, stop in self.chunks(lengths)]
        return tuple(stop - start for start, stop in ends), tuple(stop for _, stop in ends)

    def places(self, lengths: Sequence[int]) -> Tensor:
        """(l,) int64: where this rank's tokens stand in the pack."""
        if self.size == 1:
            return torch.arange(sum(lengths))
        return torch.cat([torch.arange(start + a, start + b) for start, a, b in self.chunks(lengths)])

    def find(self, places_W: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of places in the pack those that are here: (N,) int64 where on this rank, and which of the W they are."""
        if self.size == 1:
            return places_W, torch.arange(len(places_W))
        mine = self.places(lengths)
        here = torch.full((sum(lengths),), -1).index_copy(0, mine, torch.arange(len(mine)))[places_W]
        own_N = (here >= 0).nonzero().squeeze(1)
        return here[own_N], own_N

    def key_rows(self, lengths: Sequence[int]) -> Tensor:
        """(k,) int64: rows of `gather_keys_values`'s ranks, one after the other, that this rank's chunks see: for each
        chunk those of its segment up to the chunk's end."""
        gathered = torch.cat([ContextShard(self.size, rank).places(lengths) for rank in range(self.size)])
        row_of = torch.empty_like(gathered).index_copy(0, gathered, torch.arange(len(gathered)))
        return torch.cat([row_of[start : start + b] for start, _, b in self.chunks(lengths)])


WHOLE = ContextShard(1, 0)
"""The only rank of packs that are not shared out."""


def gather_keys_values(key: Tensor, value: Tensor, rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(l, g, d) each -> (k, g, d): the `rows` of those of all ranks; backward reduce-scatters."""
    both = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), group=group)
    return both.index_select(0, rows).unbind(1)


def whole_output(output_N: Tensor, own_N: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """(W,) on all ranks: what each of them has of `total` numbers, at its places `own_N`."""
    whole_W = output_N.new_zeros(total).index_copy(0, own_N, output_N)
    dist.all_reduce(whole_W, group=group)
    return whole_W
