"""What of a role is where: weights, gradients and optimizer state leave the device while the role rests.

A role comes back by itself where it is run: its weights for a forward pass, everything for an update. Who only reads
weights or state (the weight stream, checkpoints, exports) reads them where they lie, and brings nothing back. `rest` is
called where a role's turn ends.
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
    """The tensors of a role on one rank, to be asked anew each time, since an optimizer's state grows."""

    weights: Callable[[], Iterable[Tensor]]
    gradients: Callable[[], Iterable[Tensor]] = tuple
    """The buffers in which they add up; every update begins with zeros."""
    optimizer: Callable[[], Iterable[Tensor]] = tuple
    """Adam's moments, and main weights that are not the weights."""
    optimizer_bytes: Callable[[], int] = int
    """Of the optimizer's tensors once there are moments."""


class RoleStorage:
    """Moves what the settings say of a role that is on this rank."""

    def __init__(self, options: BuildOptions, tensors: RoleTensors) -> None:
        moved, self._tensors, self._on_cpu = options.offload, tensors, options.device.type == "cpu"
        self._weights = Movable(_place(options)) if moved.weights else None
        self._gradients = Movable() if moved.gradients else None
        self._optimizer = Movable(_place(options)) if moved.optimizer else None

    def rest(self) -> None:
        """Everything that the settings name leaves the device, beside what is computed next."""
        if self._gradients is not None:
            self._gradients.leave(self._tensors.gradients())
        if self._optimizer is not None:
            self._optimizer.leave(self._tensors.optimizer(), reserve_bytes=self._tensors.optimizer_bytes())
        if self._weights is not None:
            self._weights.leave(self._tensors.weights())
        if self._on_cpu and any(self._moved()):
            trim_heap()

    def bring_weights(self) -> None:
        """The weights are there for a forward pass, which does not change them."""
        if self._weights is not None:
            self._weights.come_back(unchanged=True)
            self._weights.arrive()

    def bring_all(self) -> None:
        """Weights and gradients are there, the optimizer's state is on its way: `await_optimizer` before it is used."""
        for part in (self._weights, self._gradients, self._optimizer):
            if part is not None:
                part.come_back()
        if self._weights is not None:
            self._weights.arrive()

    def await_optimizer(self) -> None:
        """What `bring_all` has begun is done."""
        if self._optimizer is not None:
            self._optimizer.arrive()

    def read(self, tensor: Tensor, elements: slice = slice(None)) -> Tensor:
        """Elements of a tensor of the role, flattened, wherever they lie: not to be written to."""
        for part in self._moved():
            found = part.read(tensor, elements)
            if found is not None:
                return found
        return tensor.detach().flatten()[elements]

    def _moved(self) -> Iterator[Movable]:
        return (part for part in (self._weights, self._optimizer, self._gradients) if part is not None)


def _place(options: BuildOptions) -> RestingPlace:
    return RestingPlace(options.device, options.offload_directory)
