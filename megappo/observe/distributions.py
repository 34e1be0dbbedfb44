"""Distributions of the samples and tokens of a step over all ranks, counted in fixed bins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # readers of metrics import this module without torch
    import torch
    from torch import Tensor

_SMALLEST, _LARGEST, _RATIO = 1e-4, 1e6, 1.1
_POSITIVE = tuple(_SMALLEST * _RATIO**n for n in range(math.ceil(math.log(_LARGEST / _SMALLEST, _RATIO)) + 1))
EDGES = (*(-edge for edge in reversed(_POSITIVE)), *_POSITIVE)
"""486 edges of bins; adjacent edges differ by 10%, as in TensorBoard's summaries. Weights & Biases accepts 512 bins.
The middle bin contains 0. The outermost bins also count numbers beyond the edges."""
NAMES = ("reward", "response length", "advantage", "return", "value", "kl", "ratio to the engine")
"""Quantities of samples and of generated tokens."""


class Distribution(NamedTuple):
    """Counts of numbers between edges, from the first to the last bin with a number."""

    edges: tuple[float, ...]
    """Ascending edges, one more than `counts`."""
    counts: tuple[int, ...]


def counts_of(numbers: Tensor) -> Tensor:
    """Return the number of finite numbers of a tensor of any shape in each bin. A bin excludes its lower edge.

    The counts are int64, on the device of the numbers.
    """
    import torch

    finite = numbers[torch.isfinite(numbers)].double()
    places = torch.bucketize(finite, torch.tensor(EDGES, dtype=torch.float64, device=finite.device)) - 1
    return torch.bincount(places.clamp(0, len(EDGES) - 2), minlength=len(EDGES) - 1)


def of_all_ranks(numbers: Iterable[tuple[str, Tensor]], device: torch.device) -> dict[str, Distribution]:
    """Return the distributions over all ranks, by name. Names without numbers are absent. A collective of all ranks
    that reduces 27 kB.

    Args:
        numbers: numbers of this rank, with names from NAMES.
        device: device for the collective.
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
    """Return the middle and the count of each bin."""
    pairs = itertools.pairwise(distribution.edges)
    return (((low + high) / 2, count) for (low, high), count in zip(pairs, distribution.counts, strict=True))
