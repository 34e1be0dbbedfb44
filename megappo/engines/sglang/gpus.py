"""Chooses the GPUs of a server, and the CUDA_VISIBLE_DEVICES that says so."""

from __future__ import annotations

import torch

from megappo.config.engine import SGLangSettings
from megappo.errors import RunError
from megappo.runtime.device import sees_one_device

_REMEDY = "let each rank see all GPUs of its machine (srun --gpus-per-node with --gpu-bind=none, not --gpus-per-task)"


def check_visible(settings: SGLangSettings) -> None:
    """Raise RunError where servers need GPUs that a launcher hides from the ranks that start them."""
    if settings.urls or not torch.cuda.is_available() or not sees_one_device(torch.cuda.device_count()):
        return
    if settings.node_ranks > 1:
        raise RunError(
            f"rollout.sglang.tensor_parallel is {settings.tensor_parallel}, but each rank sees one GPU alone, so a "
            f"server that it starts has one; set it to 1, or {_REMEDY}"
        )
    if settings.placement == "disaggregated":
        raise RunError(
            "rollout.sglang.placement is disaggregated, but each rank sees one GPU alone, on which it trains; "
            f"set it to colocated, or {_REMEDY}"
        )


def server_gpus(settings: SGLangSettings, index: int, own: int, ranks_here: int) -> tuple[int, ...]:
    """GPUs of server `index` on this machine, by their number among those that this process sees. `own`: the GPU of the
    rank that starts it; `ranks_here`: number of ranks that train on this machine.

    Raises RunError where there are too few, which depends on the rank.
    """
    check_visible(settings)
    ranks, count = settings.node_ranks, torch.cuda.device_count()
    if settings.placement == "colocated":
        first = (settings.first_device or 0) + own
    else:
        first = (ranks_here if settings.first_device is None else settings.first_device) + index * ranks
    if first + ranks > count:
        raise RunError(
            f"server {index} would stand on the GPUs {first} to {first + ranks - 1}, but a rank sees {count} here; "
            "start fewer ranks or servers on this machine, or set rollout.sglang.first_device, nodes or tensor_parallel"
        )
    return tuple(range(first, first + ranks))


def visible_devices(gpus: tuple[int, ...], ours: str) -> str:
    """CUDA_VISIBLE_DEVICES of a server. `gpus`: numbers among the devices that this process sees; `ours`: its own
    CUDA_VISIBLE_DEVICES, empty for all of the machine. Names that a launcher chose, such as UUIDs, are kept."""
    names = ours.split(",") if ours else []
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpus)
