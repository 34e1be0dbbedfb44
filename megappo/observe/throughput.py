"""Model FLOPs utilisation: the share of the hardware's peak that is spent on the model's own arithmetic."""

from __future__ import annotations

import re

PEAK_FLOPS = {
    r"A100": 312e12,
    r"H100 PCIe": 756e12,
    r"H100 NVL": 835e12,
    r"H100": 989e12,
    r"H200 NVL": 835e12,
    r"H200": 989e12,
    r"H800 PCIe": 756e12,
    r"H800": 989e12,
    r"H20": 148e12,
    r"L40S": 362.05e12,
    r"B200": 2250e12,
}
"""Dense bfloat16 tensor core FLOP/s by the name of the device; the first match counts.

From NVIDIA's data sheets (A100 80GB; H100 Tensor Core GPU; H200 Tensor Core GPU; L40S; HGX B200, an eighth of the
board). The Hopper and Blackwell sheets print the figure "with sparsity", which is twice the one here. The H800 computes
as fast as the H100; the H20's figure is from the specifications that SemiAnalysis published in November 2023.
"""


def peak_flops(device_name: str) -> float | None:
    """Peak FLOP/s of a device by its name from `torch.cuda.get_device_name`; None for a device that is not in the
    table, and for a MIG slice."""
    if "MIG" in device_name:
        return None
    return next((flops for name, flops in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def training_flops_per_token(
    parameters: int, *, layers: int, heads: int, head_dim: float, sequence_tokens: float
) -> float:
    """FLOPs of a forward and a backward pass per token: 6 N + 12 layers heads head_dim T.

    Chowdhery et al. 2022, "PaLM", appendix B: recomputation is not counted, the causal mask is not discounted. A
    forward pass alone is a third of it.

    Args:
        parameters: N, weights that are multiplied with every token: all but an input embedding of its own.
        layers: transformer layers.
        heads: query heads of a layer.
        head_dim: size of a head; where that of its value is another, their mean.
        sequence_tokens: T, mean tokens of a sequence, prompt and response.
    """
    return 6.0 * parameters + 12.0 * layers * heads * head_dim * sequence_tokens


def mfu(tokens_per_second: float, flops_per_token: float, *, devices: int, device_name: str) -> float | None:
    """Share (0 to 1) of the peak of `devices` equal devices; None where the device is not in the table.

    Args:
        tokens_per_second: of all devices together.
        flops_per_token: what one such token costs, such as `training_flops_per_token` for a token trained on once.
        devices: how many worked on it.
        device_name: as `torch.cuda.get_device_name` gives it.
    """
    peak = peak_flops(device_name)
    return None if peak is None else tokens_per_second * flops_per_token / (devices * peak)
