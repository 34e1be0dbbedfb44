"""AdamW that keeps and updates a part of its state on the host (`optimizer.on_host`).

`HybridDeviceOptimizer` of Megatron-Core accepts only CUDA parameters and keeps the main weights on the device. On a
CPU, 0.16.1 raises KeyError at the first step, so tests on a CPU are impossible. Here, gradients are copied to the
host, the fused AdamW of torch updates the host part, and the weights are copied back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_SHARED = ("lr", "betas", "eps", "weight_decay")
"""Settings of a parameter group that are copied from the device to the host. Megatron's schedule sets them in the
group of the device."""


class PartlyOnHost:
    """Replacement for an optimizer of Megatron that updates a part of its main weights on the host."""

    def __init__(self, device: torch.optim.Optimizer, fraction: float, weight_storages: set[int]) -> None:
        """Move a fraction of the weights of the optimizer `device` to the host.

        `weight_storages` contains the identities of the storages of the model's weights. Main weights in other
        storages are on the device only during a step.
        """
        self.device = device
        chosen = list(_largest(device.param_groups, fraction))
        self._homes = {main: _on_host(main).copy_(main.detach()) for main in chosen}
        """Float32 host copy of each main weight that is updated on the host."""
        self._gradients = {main: _on_host(main) for main in chosen}
        groups = [
            {"params": [self._homes[p] for p in group["params"] if p in self._homes], **_shared(group)}
            for group in device.param_groups
        ]
        self._host = torch.optim.AdamW(groups, fused=True)
        storages = [main.untyped_storage() for main in chosen]
        self._brought = [(s, s.nbytes()) for s in storages if s._cdata not in weight_storages]
        self.release()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all main weights, as Megatron and its schedule expect them."""
        return self.device.param_groups

    @property
    def state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """Optimizer state of the device part."""
        return self.device.state

    def whereabouts(self, main: Tensor) -> tuple[torch.optim.Optimizer, Tensor]:
        """Return the optimizer with the moments of a main weight, and the tensor that this optimizer updates."""
        return (self._host, self._homes[main]) if main in self._homes else (self.device, main)

    @torch.no_grad()
    def step(self) -> None:
        """Update all main weights. The device part is updated while gradients are copied to the host."""
        gradients = {main: main.grad for main in self._homes}
        for main, gradient in gradients.items():
            assert gradient is not None, "a parameter without a gradient"
            self._gradients[main].copy_(gradient, non_blocking=True)
            main.grad = None  # the device optimizer skips this weight
        arrived = torch.cuda.current_stream().record_event()
        self.device.step()
        arrived.synchronize()
        self._step_host()
        for storage, size in self._brought:
            storage.resize_(size)
        for main, home in self._homes.items():
            main.copy_(home, non_blocking=True)
            main.grad = gradients[main]

    def _step_host(self) -> None:
        for group, source in zip(self._host.param_groups, self.device.param_groups, strict=True):
            group |= _shared(source)
        for main, home in self._homes.items():
            home.grad = self._gradients[main]
        self._host.step()

    def release(self) -> None:
        """Free the device memory of separate main weights after Megatron has copied them."""
        for storage, _ in self._brought:
            storage.resize_(0)


def _largest(groups: Iterable[Mapping[str, Any]], fraction: float) -> Iterator[Tensor]:
    """Yield the largest main weights until they contain at least a fraction of all elements. Adjacent tensor parallel
    ranks choose the same weights. A tied embedding is first, because its copies on two stages must be updated in the
    same way."""
    mains = [main for group in groups for main in group["params"]]
    required, taken = fraction * sum(main.numel() for main in mains), 0
    for main in sorted(mains, key=lambda m: (not getattr(m, "shared", False), -m.numel())):
        if taken >= required:
            return
        taken += main.numel()
        yield main


def _on_host(main: Tensor) -> Tensor:
    return torch.empty(main.shape, dtype=torch.float32, pin_memory=main.is_cuda)


def _shared(group: Mapping[str, Any]) -> dict[str, float | tuple[float, float]]:
    return {name: group[name] for name in _SHARED}
