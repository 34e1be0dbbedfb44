"""AdamW of which a part lives and steps on the host (`optimizer.on_host`).

Megatron-Core has one (`HybridDeviceOptimizer`), which takes only CUDA's parameters, so that nothing of it runs on a CPU
(0.16.1 raises KeyError at the first step), and keeps the main weights on the device besides. Here gradients travel to
the host, torch's fused AdamW steps there, and weights travel back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_SHARED = ("lr", "betas", "eps", "weight_decay")
"""What a parameter group of the host has from that of the device, where Megatron's schedule sets it."""


class PartlyOnHost:
    """Stands in the place of an optimizer that Megatron has made, and updates a part of its main weights itself."""

    def __init__(self, device: Any, fraction: float, weight_storages: set[int]) -> None:
        """Take over this fraction of what `device` updates. `weight_storages`: identities of those that hold the
        model's weights; main weights elsewhere are on the device for the moment of a step only."""
        self.device = device
        chosen = list(_largest(device.param_groups, fraction))
        self._homes = {main: _on_host(main).copy_(main.detach()) for main in chosen}
        """What steps on the host in the place of a main weight."""
        self._gradients = {main: _on_host(main) for main in chosen}
        groups: list[dict[str, Any]] = [
            {"params": [self._homes[p] for p in group["params"] if p in self._homes], **_shared(group)}
            for group in device.param_groups
        ]
        self._host = torch.optim.AdamW(groups, fused=True)
        storages = [main.untyped_storage() for main in chosen]
        self._brought = [(s, s.nbytes()) for s in storages if s._cdata not in weight_storages]
        self.release()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of everything, as Megatron and its schedule know them."""
        groups: list[dict[str, Any]] = self.device.param_groups
        return groups

    @property
    def state(self) -> Any:
        """Of the device's part."""
        return self.device.state

    def whereabouts(self, main: Tensor) -> tuple[Any, Tensor]:
        """The optimizer that has a main weight's moments, and what it knows the weight by."""
        return (self._host, self._homes[main]) if main in self._homes else (self.device, main)

    @torch.no_grad()
    def step(self) -> None:
        """Update everything from the main weights' gradients, the device's part while gradients travel."""
        given = {main: main.grad for main in self._homes}
        for main, gradient in given.items():
            assert gradient is not None, "a parameter without a gradient"
            self._gradients[main].copy_(gradient, non_blocking=True)
            main.grad = None  # the device's optimizer passes over it
        arrived = torch.cuda.current_stream().record_event()
        self.device.step()
        arrived.synchronize()
        self._step_host()
        for storage, size in self._brought:
            storage.resize_(size)
        for main, home in self._homes.items():
            main.copy_(home, non_blocking=True)
            main.grad = given[main]

    def _step_host(self) -> None:
        for group, source in zip(self._host.param_groups, self.device.param_groups, strict=True):
            group |= _shared(source)
        for main, home in self._homes.items():
            home.grad = self._gradients[main]
        self._host.step()

    def release(self) -> None:
        """Give up main weights on the device that are not the model's weights, once Megatron has copied them."""
        for storage, _ in self._brought:
            storage.resize_(0)


def _largest(groups: list[dict[str, Any]], fraction: float) -> Iterator[Tensor]:
    """Main weights that together are at least this fraction of all, the largest first: tensor parallel neighbours
    choose the same. A tied embedding comes before all, as its copies on two stages must be updated alike."""
    mains = [main for group in groups for main in group["params"]]
    wanted, taken = fraction * sum(main.numel() for main in mains), 0
    for main in sorted(mains, key=lambda m: (not getattr(m, "shared", False), -m.numel())):
        if taken >= wanted:
            return
        taken += main.numel()
        yield main


def _on_host(main: Tensor) -> Tensor:
    return torch.empty(main.shape, dtype=torch.float32, pin_memory=main.is_cuda)


def _shared(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _SHARED}
