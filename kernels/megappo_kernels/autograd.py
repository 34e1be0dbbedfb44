"""Types of the `ctx` that torch gives to autograd functions; torch's own stubs know of one saved tensor only."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

Kept = TypeVar("Kept")


class Context(Protocol):
    """A function that keeps nothing but tensors from forward to backward."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """Tensors that forward saved, in its order; None in place of those that were None."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep inputs and results of forward."""

    def set_materialize_grads(self, value: bool) -> None:
        """Whether backward gets zeros in place of gradients that nobody needs, instead of None."""


class ContextWith(Context, Protocol[Kept]):
    """A function that keeps `kept` besides, which is no tensor."""

    kept: Kept
