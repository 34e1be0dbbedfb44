"""Metrics of the critic: quality of the predicted rewards.

One forward pass over all samples computes the values. The returns are discounted sums of rewards (lambda 1). With a
smaller lambda, the target of the critic would contain the values of the critic. The tokens of all ranks are pooled.

Shape legend: B samples of this rank, R longest response.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megappo.runtime.ranks.tally import Tally

_EQUAL = 1e-6
"""Returns are equal up to rounding if the ratio of the standard deviation to the mean is below this number."""


def tally_values(tally: Tally, values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor) -> None:
    """Add the values and the errors of the values at the tokens where `mask_BR` is True. The returns use lambda 1."""
    tally.mean("critic/value_mean", values_BR, mask_BR)
    tally.mean_and_std("returns", returns_BR, mask_BR)
    tally.mean_and_std("errors", returns_BR.double() - values_BR.double(), mask_BR)


def critic_metrics(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the reduced numbers with the explained variance instead of the parts of `tally_values`.

    Without tokens, or if all returns are equal, the result has no explained variance.
    """
    parts = ("returns/mean", "returns/std", "errors/mean", "errors/std")
    others = {name: value for name, value in numbers.items() if name not in parts}
    spread = numbers.get("returns/std", 0.0)
    if spread > _EQUAL * abs(numbers.get("returns/mean", 0.0)):
        others["critic/explained_variance"] = 1 - (numbers["errors/std"] / spread) ** 2
    return others
