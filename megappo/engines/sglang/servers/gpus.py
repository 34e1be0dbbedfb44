"""Select the GPUs of a server and its CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import torch

from megappo.config.sections.engine import ServerSettings
from megappo.engines.sglang.version import require_sglang
from megappo.errors import RunError
from megappo.runtime.device import sees_one_device

_REMEDY = "let each rank see all GPUs of its machine (srun --gpus-per-node with --gpu-bind=none, not --gpus-per-task)"


def check_machine(settings: ServerSettings) -> None:
    """Raise RunError if SGLang cannot run on this machine, or if a launcher hides the GPUs of servers."""
    require_sglang()
    check_visible(settings)


def check_visible(settings: ServerSettings) -> None:
    """Raise RunError if a launcher hides GPUs from the ranks that start servers on these GPUs."""
    if settings.urls or not torch.cuda.is_available() or not sees_one_device(torch.cuda.device_count()):
        return
    if settings.node_ranks > 1:
        raise RunError(
            f"rollout.servers.tensor_parallel is {settings.tensor_parallel}, but each rank sees only one GPU, so a "
            f"server of the rank has one GPU; set tensor_parallel to 1, or {_REMEDY}"
        )
    if settings.placement == "disaggregated":
        raise RunError(
            "rollout.servers.placement is disaggregated, but each rank sees only one GPU and trains on this GPU; "
            f"set placement to colocated, or {_REMEDY}"
        )


def server_gpus(settings: ServerSettings, index: int, own: int, local_ranks: int) -> tuple[int, ...]:
    """Return the GPUs of server `index` on this machine, as numbers among the GPUs that this process sees.

    `own` is the GPU of the rank that starts the server. `local_ranks` is the number of trainer ranks on this machine.
    Raises RunError if there are too few GPUs, which depends on the rank.
    """
    check_visible(settings)
    ranks, count = settings.node_ranks, torch.cuda.device_count()
    if settings.placement == "colocated":
        first = (settings.first_device or 0) + own
    else:
        first = (local_ranks if settings.first_device is None else settings.first_device) + index * ranks
    if first + ranks > count:
        raise RunError(
            f"server {index} would need the GPUs {first} to {first + ranks - 1}, but a rank sees {count} GPUs on "
            "this machine; start fewer ranks or servers on this machine, or set rollout.servers.first_device, nodes "
            "or tensor_parallel"
        )
    return tuple(range(first, first + ranks))


def visible_devices(gpus: tuple[int, ...], ours: str) -> str:
    """Return CUDA_VISIBLE_DEVICES of a server.

    `gpus` are numbers among the devices that this process sees. `ours` is the CUDA_VISIBLE_DEVICES of this process,
    or empty for all devices of the machine. Names of a launcher, such as UUIDs, are kept.
    """
    names = ours.split(",") if ours else []
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpus)
