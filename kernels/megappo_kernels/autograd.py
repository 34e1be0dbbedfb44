"""Types of the `ctx` argument of autograd functions. torch's own stubs support only one saved tensor."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

Saved = TypeVar("Saved")


class Context(Protocol):
    """Context of a function that saves only tensors from forward for backward."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """Tensors that forward saved, in the same order. Arguments that were None are None."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save inputs and results of forward."""

    def set_materialize_grads(self, value: bool) -> None:
        """Set whether backward receives zeros instead of None for unused gradients."""


class ContextWith(Context, Protocol[Saved]):
    """Context of a function that also saves `saved`, which is not a tensor."""

    saved: Saved
