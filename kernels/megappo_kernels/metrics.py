"""Reports of an objective's metrics, from tokens up to a whole step.

A report holds `count`, its number of valid tokens, and for each metric its sum over them, its largest value, or for a
spread two numbers, `<name>.mean` and `<name>.m2` (`objectives.Metric` says which). Reports of the blocks of a kernel,
chunks of the output layer, microbatches, ranks and updates are combined by the same function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megappo_kernels.objectives import metric_kind
from megappo_kernels.whiten import masked_whiten_stats, merge_whiten_stats


def measure(numbers: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Report on the valid tokens of (any one shape) numbers; float64 scalars."""
    report = {"count": mask.sum().double()}
    for name, x in numbers.items():
        x, kind = x.detach().masked_fill(~mask, 0), metric_kind(name)
        if kind == "spread":
            report[f"{name}.mean"], report[f"{name}.m2"] = masked_whiten_stats(x, mask)[1:]
        else:
            report[name] = (x.amax() if kind == "largest" and x.numel() else x.sum()).double()
    return report


def combine(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One report from (R,) values, the reports of R parts of a batch."""
    combined = {}
    for name, values_R in parts.items():
        of, _, moment = name.partition(".")
        if moment == "mean":
            stats_R3 = torch.stack([parts["count"], values_R, parts[f"{of}.m2"]], dim=1)
            _, combined[name], combined[f"{of}.m2"] = merge_whiten_stats(stats_R3)
        elif not moment:
            combined[name] = values_R.amax() if metric_kind(name) == "largest" else values_R.sum()
    return combined


def stacked(reports: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """(R,) values by name from R reports with the same names."""
    return {name: torch.stack([report[name] for report in reports]) for name in reports[0]}


def shown(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of some updates for users: means over all their tokens; terms of the loss are averaged over updates."""
    names = updates[0]
    total = combine({name: torch.tensor([u[name] for u in updates], dtype=torch.float64) for name in names})
    count, numbers = float(total["count"]), {}
    for name in names:
        kind = metric_kind(name)
        if kind == "term":
            numbers[name] = float(total[name]) / len(updates)
        elif kind == "largest":
            numbers[name] = float(total[name])
        elif "." not in name and name != "count" and count:
            numbers[name] = float(total[name]) / count
    if "token_weight.m2" in total and count:
        square = float(total["token_weight.mean"]) ** 2
        mean_square = square + float(total["token_weight.m2"]) / count
        numbers["effective_sample_size"] = square / mean_square if mean_square else 0.0
    return numbers
