"""Distributions of a step's samples and tokens over all ranks, counted in the same bins everywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # what reads metrics imports this, and no torch
    import torch
    from torch import Tensor

_SMALLEST, _LARGEST, _RATIO = 1e-4, 1e6, 1.1
_POSITIVE = tuple(_SMALLEST * _RATIO**n for n in range(math.ceil(math.log(_LARGEST / _SMALLEST, _RATIO)) + 1))
EDGES = (*(-edge for edge in reversed(_POSITIVE)), *_POSITIVE)
"""Edges of bins, a tenth apart in size, as TensorBoard's own summaries have them: 486, and Weights & Biases takes 512
bins. That in the middle holds 0; what lies beyond the edges counts in the outermost ones."""
NAMES = ("reward", "response length", "advantage", "return", "value", "kl", "ratio to the engine")
"""Numbers of samples, and of the tokens that the model made."""


class Distribution(NamedTuple):
    """How many numbers lie between each two edges, from the first number's bin to the last one's."""

    edges: tuple[float, ...]
    """Rising; one more than `counts`."""
    counts: tuple[int, ...]


def counts_of(numbers: Tensor) -> Tensor:
    """How many of a tensor's finite numbers, of whatever shape, lie in each bin: the lower edge does not belong to it.
    int64, on the device of the numbers."""
    import torch

    finite = numbers[torch.isfinite(numbers)].double()
    places = torch.bucketize(finite, torch.tensor(EDGES, dtype=torch.float64, device=finite.device)) - 1
    return torch.bincount(places.clamp(0, len(EDGES) - 2), minlength=len(EDGES) - 1)


def of_all_ranks(numbers: Iterable[tuple[str, Tensor]], device: torch.device) -> dict[str, Distribution]:
    """The distributions of all ranks' numbers, by those of NAMES that any rank has numbers of; a collective of the
    world, of 27 kB however many ranks there are.

    Args:
        numbers: this rank's, by what is in NAMES.
        device: that of collectives.
    """
    import torch

    counts_NK = torch.zeros(len(NAMES), len(EDGES) - 1, dtype=torch.int64, device=device)
    for name, own in numbers:
        counts_NK[NAMES.index(name)] = counts_of(own).to(device)
    torch.distributed.all_reduce(counts_NK)
    return {name: _between(row) for name, row in zip(NAMES, counts_NK.tolist(), strict=True) if any(row)}


def _between(counts: Sequence[int]) -> Distribution:
    filled = [place for place, count in enumerate(counts) if count]
    first, last = filled[0], filled[-1]
    return Distribution(EDGES[first : last + 2], tuple(counts[first : last + 1]))


def middles(distribution: Distribution) -> Iterator[tuple[float, int]]:
    """The middle of each bin, and its count."""
    pairs = itertools.pairwise(distribution.edges)
    return (((low + high) / 2, count) for (low, high), count in zip(pairs, distribution.counts, strict=True))
