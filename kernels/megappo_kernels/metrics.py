"""Reports of an objective's metrics, from tokens up to a whole step.

A report contains `count`, the number of valid tokens, and numbers for each metric. The number is the sum or the
maximum over tokens. A spread has two numbers, `<name>.mean` and `<name>.m2` (see `objectives.Metric`). One function
combines reports of kernel blocks, chunks of the output layer, microbatches, ranks and updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megappo_kernels.objectives import metric_kind
from megappo_kernels.whiten import masked_whiten_stats, merge_whiten_stats


def measure(numbers: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Return a report on the valid tokens, as float64 scalars. All numbers have the same shape."""
    report = {"count": mask.sum().double()}
    for name, x in numbers.items():
        x, kind = x.detach().masked_fill(~mask, 0), metric_kind(name)
        if kind == "spread":
            report[f"{name}.mean"], report[f"{name}.m2"] = masked_whiten_stats(x, mask)[1:]
        else:
            report[name] = (x.amax() if kind == "largest" and x.numel() else x.sum()).double()
    return report


def combine(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Combine the reports of R parts of a batch, given as (R,) values by name."""
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
    """Stack R reports with the same names to (R,) values by name."""
    return {name: torch.stack([report[name] for report in reports]) for name in reports[0]}


def shown(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of some updates for users. Means are over all tokens; loss terms are averaged over updates."""
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
