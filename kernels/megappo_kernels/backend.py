"""Selection of the implementation: Triton kernels on CUDA, torch on other devices and for float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["torch", "triton"]

_forced: ContextVar[Backend | None] = ContextVar("forced_backend", default=None)


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Force one implementation on all devices. Triton on a CPU requires TRITON_INTERPRET=1 before its first import.

    Backward uses the implementation of its forward. torch always computes float64.
    """
    if name not in ("torch", "triton"):
        raise ValueError(f"'{name}' is not a backend; choose torch or triton")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def runs_triton(tensor: Tensor) -> bool:
    """Return whether a call with this tensor uses the Triton kernels."""
    if tensor.dtype == torch.float64:
        return False
    forced = _forced.get()
    return tensor.is_cuda if forced is None else forced == "triton"
