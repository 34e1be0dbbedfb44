"""Gauges of the critic: how well values predict the rewards that follow.

The values are those of one forward pass over all samples. The returns are discounted sums of rewards (lambda 1): with a
smaller lambda, the target of the critic contains the critic's own values. The tokens of all ranks are pooled.

Shape legend: B samples of this rank, R longest response.
"""

from __future__ import annotations

import math

from torch import Tensor

from megappo.runtime.tally import Tally

_EQUAL = 1e-6
"""Returns whose standard deviation is below this share of their mean differ by rounding only."""


def tally_values(tally: Tally, values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor) -> None:
    """Add values, and their errors against returns of lambda 1, at the tokens where `mask_BR` is True."""
    tally.total("values", float(mask_BR.sum()))
    tally.mean("critic/value_mean", values_BR, mask_BR)
    tally.mean_and_std("returns", returns_BR, mask_BR)
    tally.mean_and_std("errors", returns_BR.double() - values_BR.double(), mask_BR)


def critic_metrics(numbers: dict[str, float]) -> dict[str, float]:
    """The metrics of `tally_values`, which are removed from the reduced numbers. Empty where no token counts."""
    own = ("values", "critic/value_mean", "returns/mean", "returns/std", "errors/mean", "errors/std")
    tokens, value_mean, mean, spread, _, error = (numbers.pop(name) for name in own)
    if not tokens:
        return {}
    explained = 1 - (error / spread) ** 2 if spread > _EQUAL * abs(mean) else math.nan
    return {"critic/value_mean": value_mean, "critic/explained_variance": explained}
