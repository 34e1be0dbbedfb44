"""Means, deviations and extremes over all ranks, with at most three collectives for all of them."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


class Tally:
    """Collects local sums; `reduce` turns them into global numbers. Every rank adds the same names."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._spreads: dict[str, tuple[float, float, float]] = {}
        """Count, mean and sum of squared deviations of this rank's values."""

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """The mean of `values` where `mask` is True (everywhere without a mask)."""
        chosen = (values if mask is None else values[mask]).double()
        self._sums[name] = (float(chosen.sum()), float(chosen.numel()))

    def total(self, name: str, value: float) -> None:
        """A sum over ranks."""
        self._sums[name] = (value, -1.0)

    def maximum(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """The maximum of `values` where `mask` is True; -inf where there is none."""
        chosen = values if mask is None else values[mask]
        self._maxima[name] = float(chosen.max()) if chosen.numel() else float("-inf")

    def minimum(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """The minimum of `values` where `mask` is True; inf where there is none."""
        self.maximum(f"-{name}", -values, mask)

    def mean_and_std(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """`name`/mean and `name`/std (population)."""
        self.mean(f"{name}/mean", values, mask)
        total, count = self._sums[f"{name}/mean"]
        mean = total / max(count, 1.0)
        squares = ((values if mask is None else values[mask]).double() - mean).square().sum()
        self._spreads[name] = (count, mean, float(squares))

    def reduce(self, device: torch.device) -> dict[str, float]:
        """The global numbers, the same on every rank; a collective of all ranks."""
        both_2N = torch.tensor([*zip(*self._sums.values(), strict=True)], dtype=torch.float64, device=device)
        maxima = torch.tensor(list(self._maxima.values()), dtype=torch.float64, device=device)
        dist.all_reduce(both_2N)
        if self._maxima:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        numbers = {
            name: total if count < 0 else total / count if count else math.nan
            for name, total, count in zip(self._sums, *both_2N.tolist(), strict=True)
        }
        numbers |= self._deviations(numbers, device)
        for name, value in zip(self._maxima, maxima.cpu().tolist(), strict=True):
            numbers[name.removeprefix("-")] = -value if name.startswith("-") else value
        return numbers

    def _deviations(self, means: dict[str, float], device: torch.device) -> dict[str, float]:
        """Standard deviations from the means of all ranks (Chan et al. 1979). A mean of squares less the square of the
        mean would lose its digits where the mean is large."""
        if not self._spreads:
            return {}
        rows = [
            (count, squares + (count * (mean - means[f"{name}/mean"]) ** 2 if count else 0.0))
            for name, (count, mean, squares) in self._spreads.items()
        ]
        both_N2 = torch.tensor(rows, dtype=torch.float64, device=device)
        dist.all_reduce(both_N2)
        return {
            f"{name}/std": (squares / count) ** 0.5 if count else math.nan
            for name, (count, squares) in zip(self._spreads, both_N2.tolist(), strict=True)
        }
