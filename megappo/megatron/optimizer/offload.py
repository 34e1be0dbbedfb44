"""Offload of a role: weights, gradients and optimizer state leave the device between uses of the role.

A forward pass loads the weights, and an update loads all tensors. The weight stream, checkpoints and exports read
weights and state in their current location without a transfer. `rest` is called after each use of a role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from megappo.megatron.build import BuildOptions
from megappo.runtime.memory.allocator import trim_heap
from megappo.runtime.memory.resting import Movable, RestingPlace


@dataclass(frozen=True)
class RoleTensors:
    """Tensors of a role on one rank. The fields are functions, because the state of an optimizer grows."""

    weights: Callable[[], Iterable[Tensor]]
    gradients: Callable[[], Iterable[Tensor]] = tuple
    """Buffers that accumulate gradients. Every update begins with zeros."""
    optimizer: Callable[[], Iterable[Tensor]] = tuple
    """Moments of Adam, and main weights that are separate from the model's weights."""
    optimizer_bytes: Callable[[], int] = int
    """Size of the optimizer's tensors in bytes, including moments that do not exist yet."""


class RoleStorage:
    """Storage of a role on this rank, which moves the role's tensors to and from the device."""

    def __init__(self, options: BuildOptions, tensors: RoleTensors) -> None:
        moved, self._tensors, self._on_cpu = options.offload, tensors, options.device.type == "cpu"
        self._weights = Movable(_place(options)) if moved.weights else None
        self._gradients = Movable() if moved.gradients else None
        self._optimizer = Movable(_place(options)) if moved.optimizer else None

    def rest(self) -> None:
        """Move the offloaded tensors off the device. The device can run other work at the same time."""
        if self._gradients is not None:
            self._gradients.leave(self._tensors.gradients())
        if self._optimizer is not None:
            self._optimizer.leave(self._tensors.optimizer(), reserve_bytes=self._tensors.optimizer_bytes())
        if self._weights is not None:
            self._weights.leave(self._tensors.weights())
        if self._on_cpu and any(self._moved()):
            trim_heap()

    def bring_weights(self) -> None:
        """Load the weights for a forward pass, which does not change them."""
        if self._weights is not None:
            self._weights.restore(unchanged=True)
            self._weights.arrive()

    def bring_all(self) -> None:
        """Load weights and gradients, and start the copy of the optimizer state. Call `await_optimizer` before using
        the optimizer state."""
        for part in self._moved():
            part.restore()
        if self._weights is not None:
            self._weights.arrive()

    def await_optimizer(self) -> None:
        """Wait for the copies of the optimizer state that `bring_all` started."""
        if self._optimizer is not None:
            self._optimizer.arrive()

    def read(self, tensor: Tensor, elements: slice = slice(None)) -> Tensor:
        """Return elements of a flattened tensor of the role in any location, read-only."""
        for part in self._moved():
            values = part.read(tensor, elements)
            if values is not None:
                return values
        return tensor.detach().flatten()[elements]

    def _moved(self) -> Iterator[Movable]:
        return (part for part in (self._weights, self._gradients, self._optimizer) if part is not None)


def _place(options: BuildOptions) -> RestingPlace:
    return RestingPlace(options.device, options.offload_directory)
