"""Means, standard deviations and extremes over all ranks. All of them together use at most three collectives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Totals(Mapping[str, float]):
    """Metrics of all ranks by name, with the sums and counts of each metric.

    A mean or an extreme without a value is absent.
    """

    means: Mapping[str, tuple[float, float]]
    """Sum and count of each mean."""
    sums: Mapping[str, float]
    maxima: Mapping[str, float]
    """-inf without a value. A minimum is the maximum of the negated values; its name begins with `-`."""

    @classmethod
    def combined(cls, parts: Sequence[Totals]) -> Totals:
        """Combine the metrics of several parts. Each mean is weighted by its counts."""
        means, sums, maxima = dict[str, tuple[float, float]](), dict[str, float](), dict[str, float]()
        for part in parts:
            for name, (total, count) in part.means.items():
                before, counted = means.get(name, (0.0, 0.0))
                means[name] = before + total, counted + count
            for name, value in part.sums.items():
                sums[name] = sums.get(name, 0.0) + value
            for name, value in part.maxima.items():
                maxima[name] = max(maxima.get(name, -math.inf), value)
        return cls(means, sums, maxima)

    def _numbers(self) -> dict[str, float]:
        numbers = {name: total / count for name, (total, count) in self.means.items() if count} | dict(self.sums)
        extremes = {name: value for name, value in self.maxima.items() if value != -math.inf}
        return numbers | {n.removeprefix("-"): -value if n.startswith("-") else value for n, value in extremes.items()}

    def __getitem__(self, name: str) -> float:
        return self._numbers()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers())

    def __len__(self) -> int:
        return len(self._numbers())


class Tally:
    """Local sums of this rank, which `reduce` turns into global numbers. Every rank adds the same names."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._spreads: dict[str, tuple[float, float, float]] = {}
        """Count, mean and sum of squared deviations of the values of this rank."""

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add the mean of `values` where `mask` is True, by default of all values."""
        chosen = (values if mask is None else values[mask]).double()
        self._sums[name] = (float(chosen.sum()), float(chosen.numel()))

    def total(self, name: str, value: float) -> None:
        """Add a sum over ranks."""
        self._sums[name] = (value, -1.0)

    def maximum(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add the maximum of `values` where `mask` is True, by default of all values."""
        chosen = values if mask is None else values[mask]
        self._maxima[name] = float(chosen.max()) if chosen.numel() else float("-inf")

    def minimum(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add the minimum of `values` where `mask` is True, by default of all values."""
        self.maximum(f"-{name}", -values, mask)

    def mean_and_std(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add `name`/mean and `name`/std (population)."""
        self.mean(f"{name}/mean", values, mask)
        total, count = self._sums[f"{name}/mean"]
        mean = total / max(count, 1.0)
        squares = ((values if mask is None else values[mask]).double() - mean).square().sum()
        self._spreads[name] = (count, mean, float(squares))

    def reduce_totals(self, device: torch.device) -> Totals:
        """Return the global sums, counts and extremes, which are equal on all ranks. Deviations are not included. A
        collective over all ranks."""
        both_2N = torch.tensor([*zip(*self._sums.values(), strict=True)], dtype=torch.float64, device=device)
        maxima = torch.tensor(list(self._maxima.values()), dtype=torch.float64, device=device)
        dist.all_reduce(both_2N)
        if self._maxima:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        reduced = [*zip(self._sums, *both_2N.tolist(), strict=True)]
        return Totals(
            means={name: (total, count) for name, total, count in reduced if count >= 0},
            sums={name: total for name, total, count in reduced if count < 0},
            maxima=dict(zip(self._maxima, maxima.cpu().tolist(), strict=True)),
        )

    def reduce(self, device: torch.device) -> dict[str, float]:
        """Return the global numbers, which are equal on all ranks. A mean, deviation or extreme without a value is
        absent. A collective over all ranks."""
        totals = self.reduce_totals(device)
        return {**totals, **self._deviations(totals, device)}

    def _deviations(self, means: Mapping[str, float], device: torch.device) -> dict[str, float]:
        """Compute standard deviations from the means of all ranks (Chan et al. 1979). The difference between the mean
        of squares and the square of the mean would be inaccurate for large means."""
        if not self._spreads:
            return {}
        rows = [
            (count, squares + (count * (mean - means[f"{name}/mean"]) ** 2 if count else 0.0))
            for name, (count, mean, squares) in self._spreads.items()
        ]
        both_N2 = torch.tensor(rows, dtype=torch.float64, device=device)
        dist.all_reduce(both_N2)
        return {
            f"{name}/std": (squares / count) ** 0.5
            for name, (count, squares) in zip(self._spreads, both_N2.tolist(), strict=True)
            if count
        }
