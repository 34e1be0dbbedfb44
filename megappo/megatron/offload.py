"""Offloading of a role: weights, gradients and optimizer state leave the device while the role rests.

Running a role brings its tensors back: weights for a forward pass, everything for an update. Readers of weights or
state (the weight stream, checkpoints, exports) read them where they are and bring nothing back. `rest` is called when a
role's turn ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from megappo.megatron.build import BuildOptions
from megappo.runtime.heap import trim_heap
from megappo.runtime.resting import Movable, RestingPlace


@dataclass(frozen=True)
class RoleTensors:
    """The tensors of a role on one rank, as functions that are called each time, since an optimizer's state grows."""

    weights: Callable[[], Iterable[Tensor]]
    gradients: Callable[[], Iterable[Tensor]] = tuple
    """Buffers in which gradients are accumulated; every update begins with zeros."""
    optimizer: Callable[[], Iterable[Tensor]] = tuple
    """Adam's moments, and main weights that are not the model's weights."""
    optimizer_bytes: Callable[[], int] = int
    """Size in bytes of the optimizer's tensors once the moments exist."""


class RoleStorage:
    """Moves a role's tensors on this rank to and from the device, as the settings say."""

    def __init__(self, options: BuildOptions, tensors: RoleTensors) -> None:
        moved, self._tensors, self._on_cpu = options.offload, tensors, options.device.type == "cpu"
        self._weights = Movable(_place(options)) if moved.weights else None
        self._gradients = Movable() if moved.gradients else None
        self._optimizer = Movable(_place(options)) if moved.optimizer else None

    def rest(self) -> None:
        """Move everything that the settings name off the device, while the device computes what comes next."""
        if self._gradients is not None:
            self._gradients.leave(self._tensors.gradients())
        if self._optimizer is not None:
            self._optimizer.leave(self._tensors.optimizer(), reserve_bytes=self._tensors.optimizer_bytes())
        if self._weights is not None:
            self._weights.leave(self._tensors.weights())
        if self._on_cpu and any(self._moved()):
            trim_heap()

    def bring_weights(self) -> None:
        """Bring the weights back for a forward pass, which does not change them."""
        if self._weights is not None:
            self._weights.come_back(unchanged=True)
            self._weights.arrive()

    def bring_all(self) -> None:
        """Bring weights and gradients back and start copying the optimizer's state; call `await_optimizer` before using
        it."""
        for part in self._moved():
            part.come_back()
        if self._weights is not None:
            self._weights.arrive()

    def await_optimizer(self) -> None:
        """Wait for the copies of the optimizer's state that `bring_all` started."""
        if self._optimizer is not None:
            self._optimizer.arrive()

    def read(self, tensor: Tensor, elements: slice = slice(None)) -> Tensor:
        """Elements of a flattened tensor of the role, wherever it is; read-only."""
        for part in self._moved():
            found = part.read(tensor, elements)
            if found is not None:
                return found
        return tensor.detach().flatten()[elements]

    def _moved(self) -> Iterator[Movable]:
        return (part for part in (self._weights, self._gradients, self._optimizer) if part is not None)


def _place(options: BuildOptions) -> RestingPlace:
    return RestingPlace(options.device, options.offload_directory)
