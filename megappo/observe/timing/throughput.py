"""Model FLOPs utilization (MFU): share of the hardware peak that the arithmetic of the model uses."""

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
"""Dense bfloat16 tensor core FLOP/s by the name of the device. The first match counts.

From NVIDIA's data sheets (A100 80GB; H100 Tensor Core GPU; H200 Tensor Core GPU; L40S; HGX B200, an eighth of the
board). The Hopper and Blackwell sheets print the value "with sparsity", twice the dense value. The H800 has the compute
throughput of the H100. The value of the H20 is from SemiAnalysis, November 2023.
"""


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s of a device with a name from `torch.cuda.get_device_name`. Return None for unknown devices
    and for MIG slices."""
    if "MIG" in device_name:
        return None
    return next((flops for name, flops in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def training_flops_per_token(
    parameters: int, *, layers: int, heads: int, head_dim: float, sequence_tokens: float
) -> float:
    """Return the FLOPs of a forward and a backward pass per token: 6 N + 12 layers heads head_dim T.

    Formula of Chowdhery et al. 2022, "PaLM", appendix B: recomputation does not count, and the causal mask does not
    reduce the FLOPs. A forward pass needs a third of the FLOPs.

    Args:
        parameters: N, number of weights that are multiplied with every token. An untied input embedding does not count.
        layers: number of transformer layers.
        heads: number of query heads of a layer.
        head_dim: size of a head, or the mean of key size and value size.
        sequence_tokens: T, mean number of tokens of a sequence (prompt and response).
    """
    return 6.0 * parameters + 12.0 * layers * heads * head_dim * sequence_tokens


def mfu(tokens_per_second: float, flops_per_token: float, *, devices: int, device_name: str) -> float | None:
    """Return the share (0 to 1) of the peak of `devices` equal devices, or None for unknown devices.

    Args:
        tokens_per_second: throughput of all devices together.
        flops_per_token: FLOPs per token, for example `training_flops_per_token` for one update per token.
        devices: number of devices.
        device_name: name from `torch.cuda.get_device_name`.
    """
    peak = peak_flops(device_name)
    return None if peak is None else tokens_per_second * flops_per_token / (devices * peak)
