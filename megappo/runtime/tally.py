"""Means and extremes over all ranks, with one pair of collectives for all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Tally:
    """Collects local sums; `reduce` turns them into global numbers. Every rank adds the same names."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}

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

    def minimum(self, name: str, values: Tensor) -> None:
        """The minimum of `values`."""
        self.maximum(f"-{name}", -values)

    def mean_and_std(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """`name`/mean and `name`/std (population)."""
        self.mean(f"{name}/mean", values, mask)
        self.mean(f"{name}/std", values.double() ** 2, mask)

    def reduce(self, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, float]:
        """The global numbers, the same on every rank; a collective of `group`."""
        sums = torch.tensor([v for v, _ in self._sums.values()], dtype=torch.float64, device=device)
        counts = torch.tensor([c for _, c in self._sums.values()], dtype=torch.float64, device=device)
        both = torch.stack([sums, counts])
        maxima = torch.tensor(list(self._maxima.values()), dtype=torch.float64, device=device)
        dist.all_reduce(both, group=group)
        if self._maxima:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        numbers = {
            name: float(total if count < 0 else total / count if count else torch.tensor(float("nan")))
            for name, total, count in zip(self._sums, *both.cpu(), strict=True)
        }
        for name in [n for n in numbers if n.endswith("/std")]:
            mean = numbers[name.removesuffix("/std") + "/mean"]
            numbers[name] = max(0.0, numbers[name] - mean**2) ** 0.5
        for name, value in zip(self._maxima, maxima.cpu().tolist(), strict=True):
            numbers[name.removeprefix("-")] = -value if name.startswith("-") else value
        return numbers
