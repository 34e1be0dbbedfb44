"""Checks of the GPUs of one machine, and of the links between GPUs and between machines."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import torch

from megappo.config import Config
from megappo.doctor.findings import Finding, broken, fine, from_sentence, slow
from megappo.errors import RunError
from megappo.runtime.device import device_index, sees_one_device
from megappo.runtime.launchers import Ranks, launcher_of, left_variables

_INFINIBAND = Path("/sys/class/infiniband")
_DRIVER = Path("/proc/driver/nvidia/version")
_FREE_SHARE = 0.9
"""Minimum share of free memory of an idle GPU. A GPU with less free memory is used by another process."""
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
"""Debugging variables and their values that slow down every run."""
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def device_findings(config: Config | None, ranks: Ranks) -> Iterator[Finding]:
    """Yield findings on GPUs, links and environment variables. `ranks` describes the current process."""
    device = config.runtime.device if config is not None else "auto"
    if not torch.cuda.is_available():
        yield _without_cuda(device)
    else:
        yield from _gpus(device, ranks)
        yield from _idle_gpus(config, ranks)
        yield from _links(ranks)
    yield from variables()
    yield from (from_sentence("variables", "slow", sentence) for sentence in left_variables(os.environ))


def _without_cuda(device: str) -> Finding:
    if _DRIVER.exists():
        if torch.version.cuda is None:
            return broken(
                "gpu", "the NVIDIA driver is installed, but this torch is a CPU build", "install a torch with CUDA"
            )
        text = f"the NVIDIA driver is installed, but torch's CUDA {torch.version.cuda} finds no device"
        return broken("gpu", text, "update the driver, or check CUDA_VISIBLE_DEVICES and the container's --gpus")
    if device == "cuda":
        return broken("gpu", "runtime.device is cuda, but there is no CUDA device", "use runtime.device: cpu")
    return fine("gpu", "none; runs use the CPU and gloo")


def _gpus(device: str, ranks: Ranks) -> Iterator[Finding]:
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    text = f"{count} x {', '.join(names)}"
    if device == "cpu":
        yield broken("gpu", f"runtime.device is cpu, but there are {text}", "set CUDA_VISIBLE_DEVICES= to hide them")
        return
    try:
        device_index(ranks, count)
    except RunError as error:
        yield from_sentence("gpu", "broken", error)
        return
    busy = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        if free < _FREE_SHARE * total:
            busy.append(f"{index} ({free / 1e9:.0f} of {total / 1e9:.0f} GB free)")
    if busy:
        yield slow("gpu", f"{text}; other processes use {', '.join(busy)}", "end the processes that nvidia-smi lists")
    elif len(names) > 1:
        yield slow("gpu", text, "use GPUs of one model; fast GPUs wait for slow GPUs")
    else:
        yield fine("gpu", text)


def _idle_gpus(config: Config | None, ranks: Ranks) -> Iterator[Finding]:
    """Yield a finding if a launcher started fewer ranks than this machine has GPUs, and if no server of the run may
    use the remaining GPUs."""
    count, local_ranks = torch.cuda.device_count(), ranks.local_world_size or ranks.world_size
    is_started = launcher_of(os.environ) != "none"
    if is_started and count > local_ranks and not sees_one_device(count) and not _has_servers_on_free_gpus(config):
        text = f"{local_ranks} ranks run on this machine, so {count - local_ranks} of its {count} GPUs are unused"
        yield slow("gpu", text, f"start {count} ranks on each machine")


def _has_servers_on_free_gpus(config: Config | None) -> bool:
    """Return whether a run starts servers that may use GPUs without a rank."""
    if config is None:
        return False
    servers, of_rewards = config.rollout.server_settings, bool(config.reward.own_servers)
    return of_rewards or (config.rollout.broadcasts and not servers.urls)


def _links(ranks: Ranks) -> Iterator[Finding]:
    count = torch.cuda.device_count()
    apart = [(a, b) for a in range(count) for b in range(a) if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        text = f"{len(apart)} of {count * (count - 1) // 2} pairs of GPUs communicate only through host memory"
        yield slow("links", text, "keep tensor parallelism within GPUs with NVLink (nvidia-smi topo -m)")
    elif count > 1:
        yield fine("links", f"all {count} GPUs have peer access")
    if (ranks.local_world_size or ranks.world_size) < ranks.world_size:
        yield _infiniband()


def _infiniband() -> Finding:
    ports = sorted(_INFINIBAND.glob("*/ports/*/state")) if _INFINIBAND.is_dir() else []
    active = [port for port in ports if "ACTIVE" in port.read_text()]
    if not ports:
        text = "the run uses several machines, but this machine has no InfiniBand or RoCE"
        return slow("network", text, "if the hardware exists, pass /dev/infiniband to the container")
    if len(active) < len(ports):
        text = f"{len(active)} of {len(ports)} InfiniBand ports are active"
        state = slow if active else broken
        return state("network", text, "have the cables or ports repaired (ibstat)")
    return fine("network", f"{len(active)} active InfiniBand ports")


def variables() -> Iterator[Finding]:
    """Yield findings on environment variables that slow down or break runs."""
    for name, bad in _SLOWING.items():
        if os.environ.get(name, "").upper() == bad:
            yield slow("variables", f"{name}={os.environ[name]}", f"unset {name}")
    interfaces = {name for _, name in socket.if_nameindex()}
    for name in _INTERFACES:
        prefixes = os.environ.get(name, "").lstrip("^=")
        if prefixes and not os.environ[name].startswith("^"):
            for prefix in prefixes.split(","):
                if not any(interface.startswith(prefix) for interface in interfaces):
                    text = f"{name} is {os.environ[name]}, but there is no interface '{prefix}'"
                    yield broken("variables", text, f"set it to one of {', '.join(sorted(interfaces))}, or unset it")
